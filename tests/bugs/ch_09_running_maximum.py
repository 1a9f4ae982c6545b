"""A streaming event detector with running maxima over time, the time axis cut over cp 3, two
micro-batches.

Each frame is encoded, joined with the maximum of the code over all frames up to it, and classified.
Every rank holds an uneven stretch of frames; the maximum over all earlier stretches comes from a
gather of the stretches' maxima, in a hand-written Function.

The bug: the backward gives a rank's gradient for its incoming maximum to the rank before it,
whichever rank the maximum came from. After prefix scans for sequence parallelism, where the
backward of a sum (or of a carry that is handed on) was the pattern.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}

ROWS, TIME, INPUTS, HIDDEN, EVENTS = 7, 11, 4, 6, 3


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts)


class EarlierMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, group):
        ctx.group, ctx.rank = group, dist.get_rank(group)
        maxima = gathered(own, group)
        ctx.save_for_backward(maxima)
        if ctx.rank == 0:
            return torch.full_like(own, -torch.inf)
        return maxima[: ctx.rank].amax(0)

    @staticmethod
    def backward(ctx, grad):
        (maxima,) = ctx.saved_tensors
        grads = gathered(grad, ctx.group)
        back = torch.zeros_like(grad)
        for later in range(ctx.rank + 1, maxima.shape[0]):
            owner = maxima[:later].argmax(0)
            back += torch.where(owner == ctx.rank, grads[later], 0)
        return back, None


class CarriedMaximum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, own, group):
        ctx.group, ctx.rank = group, dist.get_rank(group)
        maxima = gathered(own, group)
        if ctx.rank == 0:
            return torch.full_like(own, -torch.inf)
        return maxima[: ctx.rank].amax(0)

    @staticmethod
    def backward(ctx, grad):
        grads = gathered(grad, ctx.group)
        if ctx.rank + 1 == grads.shape[0]:
            return torch.zeros_like(grad), None
        return grads[ctx.rank + 1], None


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(INPUTS, HIDDEN)
        self.mix = nn.Linear(2 * HIDDEN, HIDDEN)
        self.classify = nn.Linear(HIDDEN, EVENTS)
        self.earlier = None

    def forward(self, frames):
        code = torch.tanh(self.encode(frames))
        running = code.cummax(1).values
        if self.earlier is not None:
            incoming = self.earlier(code.max(1).values)
            running = torch.maximum(running, incoming[:, None])
        return self.classify(torch.tanh(self.mix(torch.cat([code, running], -1))))


class Clean:
    scan = EarlierMaximum

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(101 + self.seed)
        return Detector()

    def batch(self):
        g = torch.Generator().manual_seed(102 + self.seed)
        return {
            "frames": torch.randn(ROWS, TIME, INPUTS, generator=g),
            "events": torch.randint(0, EVENTS, (ROWS, TIME), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["frames"])
        loss = F.cross_entropy(scores.transpose(1, 2), rows["events"], reduction="sum")
        return loss, rows["events"].numel()

    def distribute(self, model, ctx):
        group = ctx.group("cp")
        model.earlier = lambda own: self.scan.apply(own, group)
        return model

    def step(self, model, batch, ctx):
        rank, world = ctx.coords["cp"], ctx.axes["cp"]
        own = {k: torch.tensor_split(v, world, dim=1)[rank] for k, v in batch.items()}
        for frames, events in zip(*(torch.tensor_split(v, 2) for v in own.values()), strict=True):
            loss, _ = self.loss_sum(model, {"frames": frames, "events": events})
            (loss / (ROWS * TIME)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=ctx.group("cp"))


class Buggy(Clean):
    scan = CarriedMaximum


EXPECT = dict(
    right=[
        r"max",
        (
            r"rank before|"
            r"(previous|preceding|next|adjacent|wrong) (rank|stretch|shard|chunk|owner)|"
            r"neighbou?r|rank ?\+ ?1|owner|argmax|which(ever)? (rank|stretch|shard)|"
            r"where .{0,30}(came|comes) from|attain"
        ),
        r"backward|gradient|grad\b|adjoint",
    ],
    place=[r"CarriedMaximum", r"EarlierMaximum", r"\.earlier", r"grads\[ctx\.rank \+ 1\]", r"scan"],
    wrong=[
        r"tie[sd]?\b",
        r"includes? (the|its) own (stretch|maximum)|inclusive",
        r"(parameter|weight).{0,40}(not|never) (all-?)?reduc|summed (twice|again)",
        r"divis(or|ion)|normali[sz]|micro-?batch|-?inf\b",
    ],
)

WHY = (
    "The incoming maximum of rank 2 is that of rank 0 or of rank 1, element by element, and its "
    "gradient belongs to the rank where the maximum was attained. CarriedMaximum.backward returns "
    "grads[rank + 1], so all of rank 2's gradient goes to rank 1, also where rank 0 held the "
    "maximum, and enters rank 1's own largest frame instead. The forward is right, and so are the "
    "gradients of mix and classify and what rank 1 sends to rank 0; only encode gets a wrong "
    "gradient. A right cause says that the backward of the maximum over earlier ranks credits the "
    "previous rank and not the one that held the maximum (argmax). The fix is to keep the maxima "
    "and route by owner, as EarlierMaximum does."
)
