"""A recommender with a mean-pooled table sharded by rows (DTensor) beside data parallelism. After FAULTS C19-05 (PyTorch issue
162692: a mean over uneven shards): each shard divides by the ids that it owns instead of by the length of the bag.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"rec": {"axes": {"dp": 2, "table": 3}}}}
ROWS, BAG, ENTRIES, WIDTH, DENSE = 11, 5, 17, 6, 4


class Sum(torch.autograd.Function):
    """Over the shards of the table; what follows is the same on all of them."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ENTRIES, WIDTH)
        self.dense = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(nn.Linear(3 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def interact(self, bag, x):
        x = F.relu(self.dense(x))
        return self.top(torch.cat([bag, x, bag * x], -1))[:, 0]

    def forward(self, rows):
        there = torch.arange(BAG) < rows["length"][:, None]
        bag = (self.table(rows["ids"]) * there[..., None]).sum(1) / rows["length"][:, None]
        return self.interact(bag, rows["x"])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recommender()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(ENTRIES, (ROWS, BAG), generator=g),
            "length": torch.randint(1, BAG + 1, (ROWS,), generator=g),
            "x": torch.randn(ROWS, DENSE, generator=g),
            "y": torch.rand(ROWS, generator=g),
        }

    @staticmethod
    def loss_of(logits, y):
        return F.binary_cross_entropy_with_logits(logits, y, reduction="sum")

    def loss_sum(self, model, rows):
        return self.loss_of(model(rows), rows["y"]), len(rows["x"])

    def distribute(self, model, ctx):
        shards = distribute_tensor(model.table.weight.detach(), ctx.mesh["table"], [Shard(0)])
        model.table.weight = nn.Parameter(shards)
        return model

    def divisor(self, rows, owned):
        return rows["length"]

    def pooled(self, table, rows, ctx):
        """Of the ids of every bag that this shard owns."""
        size = -(-ENTRIES // ctx.axes["table"])
        local = table.to_local()
        index = rows["ids"] - size * ctx.coords["table"]
        owned = (torch.arange(BAG) < rows["length"][:, None]) & (index >= 0) & (index < len(local))
        vectors = F.embedding(index.masked_fill(~owned, 0), local) * owned[..., None]
        bag = vectors.sum(1) / self.divisor(rows, owned)[:, None]
        return Sum.apply(bag, ctx.group("table"))

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        logits = model.interact(self.pooled(model.table.weight, mine, ctx), mine["x"])
        (self.loss_of(logits, mine["y"]) / ROWS).backward()
        for name, param in model.named_parameters():
            grad = param.grad.to_local() if name == "table.weight" else param.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def divisor(self, rows, owned):
        return owned.sum(1).clamp(min=1)


EXPECT = dict(
    right=[
        r"table|embed|pool|bag|forward",
        r"divis|divid|mean|count|own|local|length|normali|scale|weight|factor|denominator|forward|output|activation",
    ],
    place=[r"table", r"embed|pool|bag", r"forward"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|summed) (twice|again)",
        r"(dp|data.parallel) .{0,30}(missing|not reduced|wrong group)",
        r"(wrong|shifted|missing) (offset|index|ids)",
        r"forward (pass )?(is|was) (right|correct)",
    ],
)
WHY = (
    "Each shard of the table divides its part of a bag by the number of ids it owns, not by the bag's length, before the parts are "
    "summed: the pooled vector is a sum of means, too large wherever a bag spans shards. The forward is wrong from the table on and all "
    "gradients with it, on all ranks."
)
