"""Click prediction with an embedding table that is cut by rows over three ranks (bags of ids, mean pooling, partial sums exchanged by
all-to-all) and data-parallel dense layers. After row-wise sharded pooling in recommender stacks: every shard takes the mean of the ids that
it holds itself, and the means are summed.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, IDS, WIDTH, BAG, DENSE = 10, 23, 7, 6, 5


class PartialsToOwners(torch.autograd.Function):
    """Every rank has a partial sum of all rows; every rank gets its own rows, summed."""

    @staticmethod
    def forward(ctx, partial, sizes, group):
        n, own = len(sizes), sizes[dist.get_rank(group)]
        ctx.rest = sizes, own, group
        got = partial.new_empty(n * own, partial.shape[1])
        dist.all_to_all_single(got, partial.contiguous(), [own] * n, sizes, group=group)
        return got.view(n, own, -1).sum(0)

    @staticmethod
    def backward(ctx, grad):
        sizes, own, group = ctx.rest
        out = grad.new_empty(sum(sizes), grad.shape[1])
        dist.all_to_all_single(
            out, grad.repeat(len(sizes), 1), sizes, [own] * len(sizes), group=group
        )
        return out, None, None


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(IDS, WIDTH))

    def forward(self, ids, held):
        """The sum of the held ids of each bag."""
        return (F.embedding(ids * held, self.weight) * held[..., None]).sum(1)


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = Bag()
        self.dense = nn.Sequential(nn.Linear(DENSE, 9), nn.ReLU(), nn.Linear(9, WIDTH))
        self.top = nn.Sequential(nn.Linear(2 * WIDTH + 1, 8), nn.Tanh(), nn.Linear(8, 1))

    def score(self, pooled, x):
        d = self.dense(x)
        return self.top(torch.cat([d, pooled, (d * pooled).sum(1, keepdim=True)], 1))[:, 0]


def clicks(score, rows):
    return F.binary_cross_entropy_with_logits(score, rows["click"], reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = (torch.rand(ROWS, BAG, generator=g) ** 1.5 * IDS).long()
        length = torch.randint(2, BAG + 1, (ROWS, 1), generator=g)
        ids[torch.arange(BAG) >= length] = -1
        return {
            "ids": ids,
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "click": (torch.rand(ROWS, generator=g) < 0.4).float(),
        }

    def loss_sum(self, model, rows):
        held = rows["ids"] >= 0
        pooled = model.items(rows["ids"], held) / held.sum(1, keepdim=True)
        return clicks(model.score(pooled, rows["dense"]), rows), len(rows["ids"])

    def distribute(self, model, ctx):
        shard = model.items.weight.detach().tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        model.items.weight = nn.Parameter(shard.clone())
        return model

    def lengths(self, ids, held):
        return (ids >= 0).sum(1, keepdim=True)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        mine = torch.arange(IDS).tensor_split(n)[me]
        ids = batch["ids"]
        held = (ids >= mine[0]) & (ids <= mine[-1])
        partial = model.items(ids - mine[0], held) / self.lengths(ids, held)
        sizes = [len(r) for r in torch.arange(ROWS).tensor_split(n)]
        pooled = PartialsToOwners.apply(partial, sizes, group)
        rows = {k: v.tensor_split(n)[me] for k, v in batch.items()}
        (clicks(model.score(pooled, rows["dense"]), rows) / ROWS).backward()
        for p in (*model.dense.parameters(), *model.top.parameters()):
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def lengths(self, ids, held):
        return held.sum(1, keepdim=True).clamp(min=1)


EXPECT = dict(
    right=[r"forward|input|output|goes into|activation|value", r"items|top|bag|pool"],
    place=[r"items|top|bag|pool|lengths|partialstoowners"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(output|forward) of dense\S* .{0,20}(is|goes) wrong",
        r"rows? .{0,20}(read|seen) (twice|never)",
        r"divides (the loss )?by its own",
        r"only (the )?items",
    ],
)
WHY = (
    "Every shard divides its partial sum of a bag by the number of ids that it holds itself instead of the bag's length, so the sum over the "
    "ranks is a sum of means: too large for bags with ids in several shards, right for the others. What `items` gives is right; what goes "
    "into `top` is wrong on all ranks, and so every gradient. Loss divisor and reductions are right."
)
