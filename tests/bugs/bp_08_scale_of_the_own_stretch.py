"""A mask-based speech separator trained for SI-SDR (scale invariant): est = mask * mixture, s = the clean signal, alpha = <est, s> / <s, s>, the loss of an utterance is 10 log10 of |est - alpha s|^2 over |alpha s|^2. An utterance's 11 frames are cut
over three ranks (4, 4, 3), all ranks see all utterances. The inner products are summed over the ranks with gradients, and each rank takes a third of the loss of the utterance. Two micro-batches, gradients summed.

The bug: each rank projects its stretch on the clean signal by an alpha of its own stretch, and only then the energies of target and residual are summed over the ranks. After time-sharded / chunked SI-SNR losses (asteroid, SpeechBrain users' chunked training) that
are scale invariant per chunk.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"time": 3}}}}
ROWS, FRAMES, SIZE = 5, 11, 6


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(SIZE, 9)
        self.hidden = nn.Linear(9, 9)
        self.mask = nn.Linear(9, SIZE)

    def forward(self, mixture):
        h = torch.tanh(self.inlet(mixture))
        return mixture * self.mask(h + torch.tanh(self.hidden(h))).sigmoid()


class SumOverTime(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


def dot(a, b):
    return (a * b).sum((1, 2))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Separator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        level = torch.rand(ROWS, FRAMES, 1, generator=g) + 0.2
        clean = level * torch.randn(ROWS, FRAMES, SIZE, generator=g)
        noise = torch.randn(ROWS, FRAMES, SIZE, generator=g)
        return {"mixture": clean + 0.5 * noise, "clean": clean}

    def loss_sum(self, model, rows):
        est, s = model(rows["mixture"]), rows["clean"]
        target, residual = self.energies(dot(est, est), dot(est, s), dot(s, s))
        return self.decibel(target, residual).sum(), len(s)

    @staticmethod
    def energies(ee, es, ss):
        target = es.square() / ss
        return target, ee - target

    @staticmethod
    def decibel(target, residual):
        return 10 * (residual.log10() - target.log10())

    def sdr_of_stretch(self, est, s, group):
        products = torch.stack([dot(est, est), dot(est, s), dot(s, s)])
        target, residual = self.energies(*SumOverTime.apply(products, group))
        return self.decibel(target, residual)

    def step(self, model, batch, ctx):
        group, size = ctx.group("time"), ctx.axes["time"]
        own = torch.arange(FRAMES).tensor_split(size)[ctx.coords["time"]]
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            mixture, s = (batch[k].tensor_split(2)[n][:, own] for k in ("mixture", "clean"))
            loss = self.sdr_of_stretch(model(mixture), s, group).sum() / size
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def sdr_of_stretch(self, est, s, group):
        alpha = (dot(est, s) / dot(s, s))[:, None, None]
        target = alpha * s
        energy = torch.stack([dot(target, target), dot(est - target, est - target)])
        return self.decibel(*SumOverTime.apply(energy, group))


EXPECT = dict(
    right=[
        r"alpha|project|scale|inner product|\bdot\b|sdr|energ|ratio|statistic|normali[sz]",
        r"own|local|per rank|each rank|every rank|stretch|shard|chunk|before .{0,30}(sum|reduc)|not (summed|reduced|global)|non.?linear|whole utterance",
    ],
    place=[r"sdr_of_stretch", r"alpha", r"SumOverTime", r"energy|energies|target"],
    wrong=[
        r"parameters?.{0,30}(not|never) reduced|reduced twice|missing all.?reduce of the (param|grad)",
        r"(gradient|loss).{0,30}(factor|times) .{0,10}(world|three|3)\b|identity backward|SumOverTime.{0,30}backward",
        r"token|mean of means|divisor of rows|only the last micro.?batch",
        r"mask.{0,20}(missing|wrong)|(wrong|other) rows",
    ],
)
WHY = (
    "alpha is <est,s>/<s,s> over the whole utterance; each of the three Buggy ranks takes its own alpha over its 4, 4 or 3 frames, so each stretch is rescaled by itself and the summed energies are those of another loss (less residual). Forward and gradients are wrong on all "
    "ranks and in both micro-batches; the sums over time with their backward and the reduction of the parameters are right. A right cause says that the projection factor / inner products are of the own stretch rather than summed over the time ranks before the ratio. Fix: sum "
    "<est,s> and <s,s> first."
)
