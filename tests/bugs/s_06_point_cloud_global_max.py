"""Classification of point clouds: the points of every cloud are cut over four ranks (3, 3, 3 and 2), a shared net per point, the maximum over
all points by an all-reduce MAX, the head replicated. After the gradient of a distributed maximum as it is written by hand for sharded
PointNets, and the missing autograd support of ReduceOp.MAX.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pts": 4}}}}
CLOUDS, POINTS, WIDTH, KINDS = 6, 11, 10, 5


class GlobalMax(torch.autograd.Function):
    """(clouds, own points, features) to (clouds, features), on every rank; every rank runs the same head, so the gradient is whole on each."""

    @staticmethod
    def forward(ctx, h, group):
        local, where = h.max(1)
        best = local.clone()
        dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
        ctx.save_for_backward(where, local == best)
        ctx.shape = h.shape
        return best

    @staticmethod
    def backward(ctx, grad):
        where, won = ctx.saved_tensors
        own = grad.new_zeros(ctx.shape)
        return own.scatter_(1, where[:, None], (grad * won)[:, None]), None


class LocalArgmax(GlobalMax):
    @staticmethod
    def backward(ctx, grad):
        where, _ = ctx.saved_tensors
        own = grad.new_zeros(ctx.shape)
        return own.scatter_(1, where[:, None], grad[:, None]), None


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, WIDTH))
        self.head = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, KINDS))

    def forward(self, cloud, pool):
        return self.head(pool(self.point(cloud)))


class Clean:
    pool = GlobalMax

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return PointNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "cloud": torch.randn(CLOUDS, POINTS, 3, generator=g),
            "kind": torch.randint(KINDS, (CLOUDS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["cloud"], lambda h: h.amax(1))
        return F.cross_entropy(logits, rows["kind"], reduction="sum"), len(rows["kind"])

    def step(self, model, batch, ctx):
        group = ctx.group("pts")
        cloud = batch["cloud"].tensor_split(ctx.axes["pts"], 1)[ctx.coords["pts"]]
        logits = model(cloud, lambda h: self.pool.apply(h, group))
        F.cross_entropy(logits, batch["kind"]).backward()
        for p in model.point.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    pool = LocalArgmax


EXPECT = dict(
    right=[
        r"point",
        r"backward|gradient (that|which|of what) (reaches|comes|goes)|reaches",
        r"point|between|localargmax|autograd.?function|positions?|vectors?|elements?",
    ],
    place=[r"point", r"head|localargmax|rank|between"],
    wrong=[
        r"forward is (wrong|right up to)|forward goes wrong",
        r"head\.\S+ (is|are) wrong|backward of (the )?`?head`? .{0,5}wrong",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(own|local) (count|denominator|divisor)",
        r"point\.0\S* .{0,20}\b4(\.0+)? times",
    ],
)
WHY = (
    "The backward of the global maximum gives the gradient of every feature to the best point of each rank, whether or not that rank holds the best "
    "of all points. So each of the four ranks feeds a point into `point` where only one should: the gradient at `point`'s output has wrong "
    "additional entries on the ranks that lost (the last bias alone comes out as 4 times). Forward and `head` are right (the head is not reduced and needs not be); all of `point` is wrong."
)
