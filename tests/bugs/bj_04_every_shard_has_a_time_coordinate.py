"""Lorentzian (hyperbolic) embeddings of a hierarchy on three tensor-parallel ranks. The coordinates of the ambient space, time first, are the outputs of a column-parallel linear layer and lie on the ranks in
parts of 3, 2 and 2; the Lorentz product of child and candidate parent is summed over the ranks. Two micro-batches of 3 and 4 rows; softmax over four candidates by minus the squared Lorentzian distance.
The divisor is the number of rows.

The bug: the sign of the metric is made from the own width, so each rank takes its own first coordinate for the time. After Lorentz-model code (HyboNet, geoopt's lorentz math: inner product with the first
entry negated) put under tensor parallelism, and the class of bugs in which a special index is counted within the shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
NODES, WIDTH, COORDINATES, CANDIDATES, ROWS = 12, 5, 7, 4, 7
EDGES = [0, 3, 5, 7]
PARTS = [(0, 3), (3, 7)]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class ToAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def metric(width):
    """Minus for the time, the first coordinate, plus for the others."""
    signs = torch.ones(width)
    signs[0] = -1
    return signs


class Lorentz(nn.Module):
    """Points of the ambient space and their Lorentz product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COORDINATES, WIDTH) * 0.5)
        self.offset = nn.Parameter(torch.randn(COORDINATES) * 0.3)
        self.signs, self.group = metric(COORDINATES), None

    def points(self, x):
        if self.group is not None:
            x = ToAllRanks.apply(x, self.group)
        return F.linear(x, self.weight, self.offset)

    def product(self, a, b):
        part = (self.signs.to(a.dtype) * a * b).sum(-1)
        return part if self.group is None else SumOverRanks.apply(part, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes = nn.Embedding(NODES, WIDTH)
        self.trunk = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.space = Lorentz()
        self.sharpness = nn.Parameter(torch.tensor(0.7))

    def forward(self, child, candidates):
        a = self.space.points(self.trunk(self.nodes(child)))
        b = self.space.points(self.trunk(self.nodes(candidates)))
        distance = -2 - 2 * self.space.product(a.unsqueeze(1), b)
        return -self.sharpness * distance


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "child": torch.randint(NODES, (ROWS,), generator=g),
            "candidates": torch.randint(NODES, (ROWS, CANDIDATES), generator=g),
            "parent": torch.randint(CANDIDATES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["child"], rows["candidates"])
        return F.cross_entropy(scores, rows["parent"], reduction="sum"), len(rows["parent"])

    def signs(self, low, high):
        return metric(COORDINATES)[low:high]

    def distribute(self, model, ctx):
        low, high = EDGES[ctx.rank], EDGES[ctx.rank + 1]
        space = model.space
        space.weight = nn.Parameter(space.weight.detach()[low:high].clone())
        space.offset = nn.Parameter(space.offset.detach()[low:high].clone())
        space.signs, space.group = self.signs(low, high), ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for low, high in PARTS:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()


class Buggy(Clean):
    def signs(self, low, high):
        return metric(high - low)


EXPECT = dict(
    right=[
        r"space|product|signs?|metric|points|lorentz|sum over",
        r"sign|negat|minus|-1|factor|forward|partial|opposite|differ",
    ],
    place=[r"space|product|signs?|metric|sum over"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"rank 0('s)? .{0,30}(part|sign|metric).{0,20}(is|are) wrong|backward formula",
        r"only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped)",
    ],
)
WHY = (
    "signs is [-1, 1, 1] on rank 0 (right), [-1, 1] on ranks 1 and 2; right there is [1, 1]. The product's term of coordinate 3 (rank 1's first) and of coordinate 5 (rank 2's first) comes with a minus, in "
    "both micro-batches and all rows. The points are right on all ranks; rank 0's own partial product is right; the sum over the ranks and all that follows are wrong on all ranks, and so are all gradients. "
    "Cut of weight and offset, sum (identity backward), copy, divisor 7 are right. Fix: cut the metric of the whole space, metric(7)[low:high]."
)
