"""A masked autoregressive flow (two Gaussian MADE layers, order of the variables turned round in
between) on tabular rows: rows over dp (2), hidden units over tp (2; 4 and 5 of 9), micro-batches
of two rows.

Hidden unit k has the degree k % (D - 1) + 1; it may see the variables up to its degree and is
seen by those beyond it. A shard that holds the units a..b needs the degrees of these.

Bug: the masks of the shard are made as in the constructor, from the number of its units, so that
the degrees of every shard begin at one. After tensor parallel conversions of masked layers that
build the buffers again with the local size.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
D, H, ROWS = 6, 9, 7


class ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def degrees_of(units):
    return units % (D - 1) + 1


def masks_of(hidden):
    """masks of the two layers for hidden units with these degrees"""
    order = torch.arange(1, D + 1)
    seen = hidden[:, None] >= order[None]
    used = order[:, None] > hidden[None]
    return seen, torch.cat([used, used])


class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(D, H)
        self.leave = nn.Linear(H, 2 * D)
        seen, used = masks_of(degrees_of(torch.arange(H)))
        self.register_buffer("seen", seen)
        self.register_buffer("used", used)
        self.group = None

    def forward(self, x):
        h = x if self.group is None else ToShards.apply(x, self.group)
        h = torch.tanh(F.linear(h, self.enter.weight * self.seen, self.enter.bias))
        h = F.linear(h, self.leave.weight * self.used)
        if self.group is not None:
            h = FromShards.apply(h, self.group)
        mean, log_scale = (h + self.leave.bias).chunk(2, dim=-1)
        log_scale = torch.tanh(log_scale)
        return (x - mean) * torch.exp(-log_scale), -log_scale.sum(-1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Made(), Made()])

    def forward(self, x):
        total = x.new_zeros(x.shape[0])
        for made in self.layers:
            x, log_det = made(x)
            x, total = x.flip(-1), total + log_det
        return x, total


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 22)
        return Flow()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 220)
        mix = torch.randn(D, D, generator=g) / 2
        return {"x": torch.randn(ROWS, D, generator=g) @ mix + 0.3}

    def loss_sum(self, model, rows):
        z, log_det = model(rows["x"])
        return (0.5 * z.square().sum(-1) - log_det).sum(), rows["x"].shape[0]

    def masks(self, a, b):
        return masks_of(degrees_of(torch.arange(a, b)))

    def distribute(self, model, ctx):
        tp, r = ctx.axes["tp"], ctx.coords["tp"]
        a, b = [round(i * H / tp) for i in range(tp + 1)][r : r + 2]
        for made in model.layers:
            made.enter.weight = nn.Parameter(made.enter.weight.detach()[a:b].clone())
            made.enter.bias = nn.Parameter(made.enter.bias.detach()[a:b].clone())
            made.leave.weight = nn.Parameter(made.leave.weight.detach()[:, a:b].clone())
            made.seen, made.used = self.masks(a, b)
            made.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        rows = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in rows.split(2):
            loss, _ = self.loss_sum(model, {"x": batch["x"][part]})
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def masks(self, a, b):
        return masks_of(degrees_of(torch.arange(b - a)))


EXPECT = dict(
    right=[
        r"mask|degree|seen|used",
        r"shard|local|tp|rank|global|offset|from (zero|one|0|1)|restart|begin|start|b\s*-\s*a",
    ],
    place=[
        r"\bmasks\b",
        r"masks_of|degrees_of",
        r"\.(seen|used)\b",
        r"\bdistribute\b",
        r"torch\.arange\(b - a\)",
    ],
    wrong=[
        r"(To|From)Shards.{0,60}(wrong|miss|twice)",
        r"(not|never|missing|twice).{0,25}(all.?reduc|summed).{0,20}\b(dp|tp)\b",
        r"leave\.bias.{0,40}(per shard|each|twice)",
        r"log.?det.{0,40}(twice|local|sign)",
        r"micro.?batch.{0,30}(mean of|weight)",
    ],
)
WHY = """The hidden unit k of MADE has the degree k % (D - 1) + 1 for its number k in the whole
layer. Buggy.masks counts the units of the shard from 0 (arange(b - a), not arange(a, b)), so that
tp rank 1 (units 4..8) has the degrees 1,2,3,4,5 and not 5,1,2,3,4: seen and used of its shard
are masks of other units. Weights, collectives and the loss are right; the outputs of both MADE
layers are wrong, and so is every gradient. Fix: degrees_of(torch.arange(a, b))."""
