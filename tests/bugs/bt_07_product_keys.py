"""A product key memory layer (Lample et al., as in the XLM code and Meta's memory layers): two sets of sub-keys, a slot for each pair (i, j) with value row i * SECOND + j, non-competitive weights. The first sub-keys and
with them the value rows are cut over three ranks (3, 2 and 2 of 7), each rank looks up its own slots with the three best second keys, the results are summed. The rest is replicated; two micro-batches.

The bug: the value row of a pair is computed with the number of the rank's own first keys as the stride instead of the number of second keys, a mix-up of the two sizes that a square memory on one process does not show.
After the index arithmetic of sharded product key memories (indices = i * n_keys + j with n_keys of the shard).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"memory": 3}}}}
ROWS, WIDTH, HALF, FIRST, SECOND, BEST, OUT = 8, 6, 4, 7, 5, 3, 3


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, 2 * HALF)
        self.first = nn.Parameter(torch.randn(FIRST, HALF))
        self.second = nn.Parameter(torch.randn(SECOND, HALF))
        self.values = nn.Embedding(FIRST * SECOND, WIDTH)

    def queries(self, x):
        return self.query(x).chunk(2, -1)

    def forward(self, x):
        q, r = self.queries(x)
        best, j = (r @ self.second.T).topk(BEST, -1)
        weights = F.silu((q @ self.first.T)[:, :, None] + best[:, None])
        slots = torch.arange(FIRST)[:, None] * SECOND + j[:, None]
        return (weights[..., None] * self.values(slots)).sum((1, 2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.memory = Memory()
        self.leave = nn.Linear(WIDTH, OUT)


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randn(ROWS, OUT, generator=g),
        }

    def loss_sum(self, model, rows):
        h = torch.tanh(model.enter(rows["x"]))
        return (model.leave(h + model.memory(h)) - rows["y"]).square().sum(), len(h)

    def slots(self, lo, hi, j):
        return torch.arange(lo, hi)[:, None] * SECOND + j[:, None]

    def lookup(self, memory, h, lo, hi, group):
        q, r = memory.queries(CopyToRanks.apply(h, group))
        best, j = (r @ memory.second.T).topk(BEST, -1)
        weights = F.silu((q @ memory.first[lo:hi].T)[:, :, None] + best[:, None])
        out = (weights[..., None] * memory.values(self.slots(lo, hi, j))).sum((1, 2))
        return SumOverRanks.apply(out, group)

    def step(self, model, batch, ctx):
        group = ctx.group("memory")
        own = torch.arange(FIRST).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            h = torch.tanh(model.enter(rows["x"]))
            y = model.leave(h + self.lookup(model.memory, h, lo, hi, group))
            ((y - rows["y"]).square().sum() / ROWS).backward()
        for p in model.memory.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def slots(self, lo, hi, j):
        n_keys = hi - lo
        return torch.arange(lo, hi)[:, None] * n_keys + j[:, None]


EXPECT = dict(
    right=[
        r"slot|index|indices|value row|values|stride|row of the (table|embedding)|lookup|embedding",
        r"stride|other (row|slot|index|indices|value|entr)|wrong (row|slot|index|indices|value|entr)|number of|different (row|slot|index)|n_keys|SECOND|offset|instead of"
        r"|(index|indices|slots|lookup|forward|output|value).{0,80}(differ|other|unlike|wrong|not what)",
    ],
    place=[r"\bslots\b", r"lookup", r"values", r"n_keys"],
    wrong=[
        r"not reduced|reduced twice|never reduced|missing (all.?)?reduc|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means",
        r"(backward|adjoint) of (Copy|Sum)|(Copy|Sum)(To|Over)Ranks.{0,40}(wrong|missing|should)",
        r"detached|no gradient|(wrong|other) (labels|targets|micro)",
    ],
)
WHY = (
    "Value row of the pair (i, j) is i * 5 + j; the Buggy slots() uses the rank's own number of first keys, 3 on rank 0 and 2 on ranks 1 and 2, as the stride. So rows of pairs run into each other (rank 0 is right for i = 0 only) "
    "and ranks read and train value rows that belong to other pairs or ranks; rows beyond get no gradient at all. Forward, loss and all gradients are wrong, worst those of memory.values. A right cause says that the rows "
    "of the value table are looked up at wrong indices (stride) in slots/lookup. Fix: i * SECOND + j."
)
