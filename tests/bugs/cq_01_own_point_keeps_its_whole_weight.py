"""Part segmentation of point clouds with two EdgeConv layers (DGCNN), points over cp (4, 4 and 3
of 11 points), clouds in three micro-batches (2, 2 and 1).

EdgeConv applies one linear layer to [x_i, x_j - x_i]. On the ranks the product is taken once per
point and not once per edge: with the weight in two halves W1, W2 the edge is
(W1 - W2) x_i + W2 x_j, and only W2 x is gathered over cp.

Bug: the half for the own point is W1, not W1 - W2. After ports of EdgeConv that split the linear
layer to save memory and forget that x_i stands in the second half as well.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
CLOUDS, POINTS, NEAR, PARTS = 5, 11, 3, 4


class GatherPoints(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[1], group
        full = x.new_zeros(x.shape[0], POINTS, x.shape[2])
        full[:, lo : lo + x.shape[1]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.lo : ctx.lo + ctx.own], None, None


def pick(x, near):
    """x (clouds, points, c), near (clouds, own points, k) -> (clouds, own points, k, c)"""
    clouds = torch.arange(x.shape[0])[:, None, None]
    return x[clouds, near]


class EdgeConv(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.edge = nn.Linear(2 * inner, outer)

    def forward(self, x, near):
        others = pick(x, near)
        own = x[:, :, None].expand_as(others)
        edges = self.edge(torch.cat([own, others - own], -1))
        return F.leaky_relu(edges, 0.2).amax(2)


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = EdgeConv(3, 6)
        self.two = EdgeConv(6, 7)
        self.head = nn.Linear(13, PARTS)

    def forward(self, points, near):
        a = self.one(points, near)
        b = self.two(a, near)
        return self.head(torch.cat([a, b], -1))


def halves(edge):
    first, second = edge.weight.chunk(2, dim=1)
    return first - second, second


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Segmenter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 110)
        points = torch.randn(CLOUDS, POINTS, 3, generator=g)
        near = torch.cdist(points, points).topk(NEAR + 1, largest=False).indices[..., 1:]
        part = torch.randint(PARTS, (CLOUDS, POINTS), generator=g)
        return {"points": points, "near": near, "part": part}

    def loss_sum(self, model, rows):
        out = model(rows["points"], rows["near"])
        loss = F.cross_entropy(out.flatten(0, 1), rows["part"].flatten(), reduction="sum")
        return loss, rows["part"].numel()

    def halves(self, edge):
        return halves(edge)

    def edge_conv(self, conv, x, near):
        for_own, for_others = self.halves(conv.edge)
        own = F.linear(x, for_own, conv.edge.bias)
        others = GatherPoints.apply(F.linear(x, for_others), self.lo, self.group)
        return F.leaky_relu(own[:, :, None] + pick(others, near), 0.2).amax(2)

    def step(self, model, batch, ctx):
        self.group = ctx.group("cp")
        own = torch.arange(POINTS).tensor_split(ctx.axes["cp"])[ctx.coords["cp"]]
        self.lo = int(own[0])
        for clouds in torch.arange(CLOUDS).split(2):
            points, near, part = (batch[k][clouds][:, own] for k in ("points", "near", "part"))
            a = self.edge_conv(model.one, points, near)
            b = self.edge_conv(model.two, a, near)
            out = model.head(torch.cat([a, b], -1))
            loss = F.cross_entropy(out.flatten(0, 1), part.flatten(), reduction="sum")
            (loss / (CLOUDS * POINTS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=self.group)


def halves_as_they_lie(edge):
    inner = edge.in_features // 2
    return edge.weight[:, :inner], edge.weight[:, inner:]


class Buggy(Clean):
    def halves(self, edge):
        return halves_as_they_lie(edge)


EXPECT = dict(
    right=[
        r"x_?j\s*-\s*x_?i|differen|minus|subtract|relative|W1\s*-\s*W2|first\s*-\s*second|"
        r"others\s*-\s*own|cent(re|er)",
        r"half|halves|split|chunk|W1|weight|own point|cent(re|er)|x_?i\b",
        r"edge",
    ],
    place=[r"halves", r"edge_conv", r"(one|two)\.edge", r"edge\.weight\[", r"first\s*-\s*second"],
    wrong=[
        r"GatherPoints.{0,60}(wrong|miss|drop|twice)",
        r"(not|never|twice|missing).{0,25}all.?reduc",
        r"neighbou?rs?.{0,30}(other cloud|local|wrong index)",
        r"uneven.{0,40}(points|shards)",
        r"leaky|slope",
    ],
)
WHY = """EdgeConv is W [x_i, x_j - x_i] + b = (W1 - W2) x_i + W2 x_j + b with W = [W1 | W2].
Buggy.halves gives W1 and W2 as they lie, so the ranks compute W1 x_i + W2 x_j: the edges lose the
difference x_j - x_i (translation of the cloud), the activations of both EdgeConv layers are wrong,
and all gradients with them. The gather and the sum over cp are right. A right cause says that the
own point misses - W2 x_i (relative feature). Fix: return first - second for the own point."""
