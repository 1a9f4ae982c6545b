"""A recommender whose embedding table is cut by rows over three ranks; ids are made unique before they are sent to their owners and the
gradients come back by all-to-all. After reports on hand-made sharded embeddings (torchrec, HugeCTR, DLRM forks) with "unique" ids: the
owner writes the gradients of each requester, and does not add them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, DENSE, BAG, TABLE, WIDTH, MICRO = 13, 4, 3, 25, 6, 2


class Lookup(torch.autograd.Function):
    """The rows `ids` (sorted, unique) of a table of which this rank holds one stretch."""

    @staticmethod
    def forward(ctx, shard, ids, starts, me, group, collect):
        owner = torch.bucketize(ids, torch.tensor(starts[1:]), right=True)
        asked = torch.bincount(owner, minlength=len(starts))
        asks = torch.empty_like(asked)
        dist.all_to_all_single(asks, asked, group=group)
        asked, asks = asked.tolist(), asks.tolist()
        theirs = ids.new_empty(sum(asks))
        dist.all_to_all_single(theirs, ids, asks, asked, group=group)
        theirs = theirs - starts[me]
        out = shard.new_empty(len(ids), shard.shape[1])
        dist.all_to_all_single(out, shard[theirs], asked, asks, group=group)
        ctx.save_for_backward(theirs)
        ctx.rest = asked, asks, group, len(shard), collect
        return out

    @staticmethod
    def backward(ctx, grad):
        (theirs,) = ctx.saved_tensors
        asked, asks, group, length, collect = ctx.rest
        got = grad.new_empty(len(theirs), grad.shape[1])
        dist.all_to_all_single(got, grad.contiguous(), asks, asked, group=group)
        total = grad.new_zeros(length, grad.shape[1])
        for ids, rows in zip(theirs.split(asks), got.split(asks), strict=True):
            collect(total, ids, rows)
        return total, None, None, None, None, None


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TABLE, WIDTH)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        self.top = nn.Sequential(nn.Linear(2 * WIDTH + 1, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, dense, vectors):
        d, s = self.bottom(dense), vectors.sum(1)
        cross = (d * s).sum(-1, keepdim=True)
        return self.top(torch.cat([d, s, cross], -1))[:, 0]


def click_loss(logits, rows):
    each = F.binary_cross_entropy_with_logits(logits, rows["click"], reduction="none")
    return (each * rows["weight"]).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Ranker()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        popular = torch.rand(ROWS, BAG, generator=g).square()
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "ids": (popular * TABLE).long(),
            "click": torch.randint(2, (ROWS,), generator=g).float(),
            "weight": torch.rand(ROWS, generator=g) + 0.5,
        }

    def loss_sum(self, model, rows):
        logits = model(rows["dense"], model.table(rows["ids"]))
        return click_loss(logits, rows), rows["weight"].sum()

    def distribute(self, model, ctx):
        parts = torch.arange(TABLE).tensor_split(ctx.axes["dp"])
        self.starts = [int(p[0]) for p in parts]
        own = parts[ctx.coords["dp"]]
        model.table.weight = nn.Parameter(model.table.weight.detach()[own].clone())
        return model

    @staticmethod
    def collect(total, ids, rows):
        total.index_add_(0, ids, rows)

    def step(self, model, batch, ctx):
        me, group = ctx.coords["dp"], ctx.group("dp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[me] for k, v in batch.items()}
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            ids, back = rows["ids"].unique(return_inverse=True)
            unique = Lookup.apply(model.table.weight, ids, self.starts, me, group, self.collect)
            loss = click_loss(model(rows["dense"], unique[back]), rows)
            (loss / batch["weight"].sum()).backward()
        for name, p in model.named_parameters():
            if name != "table.weight":
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    @staticmethod
    def collect(total, ids, rows):
        total[ids] = rows


EXPECT = dict(
    right=[
        r"table|embedding",
        r"some rows?|rows? .{0,30}\d|repeat|duplicat|several|more than one|(other|another|last|one|some|single) (rank|micro|requester|part)|"
        r"overwrit|lost|lacks?|missing|dropp|add|accumul|part of",
    ],
    place=[r"table"],
    wrong=[
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"(bottom|top)\S* (is|are|has|have) (a )?(wrong|missing|partial)",
        r"forward (pass )?(is|was) wrong|lookup (is|was) wrong|wrong vectors",
    ],
)
WHY = (
    "The owner of a table row writes the gradient that each requesting rank sends and does not add it: where two or three ranks ask for "
    "the same row in one micro-batch only the highest rank's gradient stays. table.weight lacks these parts in the popular rows; rows "
    "asked by one rank only, and the dense parts (bottom, top), are right."
)
