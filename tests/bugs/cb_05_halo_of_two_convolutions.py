"""Picking phases in seismic traces: a pointwise lift, two convolutions of width three with zero padding, and a score per sample. A trace of 19 samples is cut over four ranks (5, 5, 5 and 4). To save messages, a halo of two samples is exchanged
once, before the first convolution, which then computes one sample more on either side than the rank owns. Two micro-batches, gradients summed over the ranks.

The bug: beyond the ends of the trace the first convolution's output has to be the zero padding of the second; computed from the zeros of the halo it is the activation of the bias. After communication-avoiding halo exchange in spatial
parallel training (LBANN, DistDL and weather codes with fused halos).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"space": 4}}}}
ROWS, SAMPLES, CHANNELS, WIDTH, MICRO, HALO = 6, 19, 3, 5, 2, 2


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(CHANNELS, WIDTH, 1)
        self.first = nn.Conv1d(WIDTH, WIDTH, 3)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3)
        self.score = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, x):
        h = torch.tanh(self.lift(x))
        h = torch.tanh(self.first(F.pad(h, (1, 1))))
        h = torch.tanh(self.second(F.pad(h, (1, 1))))
        return self.score(h).squeeze(1)


class ExchangeHalo(torch.autograd.Function):
    """The own samples with HALO samples of both neighbours around them, zeros beyond the ends."""

    @staticmethod
    def swap(to_left, to_right, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        from_left, from_right = torch.zeros_like(to_right), torch.zeros_like(to_left)
        work = []
        if rank > 0:
            peer = dist.get_global_rank(group, rank - 1)
            work.append(dist.isend(to_left.contiguous(), peer, group=group))
            work.append(dist.irecv(from_left, peer, group=group))
        if rank < size - 1:
            peer = dist.get_global_rank(group, rank + 1)
            work.append(dist.isend(to_right.contiguous(), peer, group=group))
            work.append(dist.irecv(from_right, peer, group=group))
        for w in work:
            w.wait()
        return from_left, from_right

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        left, right = ExchangeHalo.swap(
            x[..., :HALO].contiguous(), x[..., -HALO:].contiguous(), group
        )
        return torch.cat((left, x, right), -1)

    @staticmethod
    def backward(fctx, grad):
        left, right = ExchangeHalo.swap(
            grad[..., :HALO].contiguous(), grad[..., -HALO:].contiguous(), fctx.group
        )
        own = grad[..., HALO:-HALO].clone()
        own[..., :HALO] += left
        own[..., -HALO:] += right
        return own, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Picker()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "trace": torch.randn(ROWS, CHANNELS, SAMPLES, generator=g),
            "pick": (torch.rand(ROWS, SAMPLES, generator=g) < 0.3).float(),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["trace"])
        loss = F.binary_cross_entropy_with_logits(scores, rows["pick"], reduction="sum")
        return loss, len(scores)

    def convolve(self, model, h, lo, hi, group):
        h = ExchangeHalo.apply(h, group)
        h = torch.tanh(model.first(h))
        place = torch.arange(lo - 1, hi + 1)
        h = h * ((place >= 0) & (place < SAMPLES)).to(h)
        return torch.tanh(model.second(h))

    def step(self, model, batch, ctx):
        own = torch.arange(SAMPLES).tensor_split(ctx.axes["space"])[ctx.coords["space"]]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for n in range(MICRO):
            trace = batch["trace"].tensor_split(MICRO)[n][..., lo:hi]
            pick = batch["pick"].tensor_split(MICRO)[n][:, lo:hi]
            h = torch.tanh(model.lift(trace))
            h = self.convolve(model, h, lo, hi, ctx.group("space"))
            scores = model.score(h).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(scores, pick, reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("space"))


class Buggy(Clean):
    def convolve(self, model, h, lo, hi, group):
        h = ExchangeHalo.apply(h, group)
        h = torch.tanh(model.first(h))
        return torch.tanh(model.second(h))


EXPECT = dict(
    right=[
        r"padding|padded|beyond|outside|ends?\b|border|boundary|edge|halo|zeros?",
        r"zero|bias|activation|mask|not (set|cleared|reset)|non.?zero|tanh|outside|beyond|first and (the )?last|ranks? 0 and (rank )?3|forward|ends",
    ],
    place=[
        r"\bconvolve\b",
        r"\bfirst\b.{0,60}(conv|output|layer)|model\.first",
        r"\bsecond\b",
        r"halo",
        r"ranks? 0|rank 3|first rank|last rank",
    ],
    wrong=[
        r"gradient of the halo.{0,40}(lost|overwritten|missing|not sent)|adjoint .{0,20}(wrong|missing)|backward.{0,20}ExchangeHalo.{0,30}wrong",
        r"(missing|no|never).{0,20}all.?reduce|not reduced|reduced twice|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"halo .{0,20}(too (narrow|small|short)|stale|detached)",
    ],
)
WHY = (
    "With one exchange of two samples the first convolution also computes the sample before and the sample after a rank's own. On rank 0 the one before and on rank 3 the one after lie beyond the trace: the single process pads them with "
    "zero for the second convolution, but Buggy leaves tanh of the first convolution's bias (and of the border samples) there. The second convolution's outputs at the two ends are wrong in both micro-batches, and so are the gradients of "
    "lift, first, second and score; ranks 1 and 2 are right. A right cause says that the values outside the trace are not zeroed between the two convolutions. Fix: mask them."
)
