"""Recommender with a row-wise sharded table (TorchRec-like, ranges of unequal length from a planner) on four ranks that are data ranks as well. Ids go to the owner of their row by all-to-all, vectors
come back the same way, gradients of vectors return to the owner, which adds them into its own rows; the dense part is summed over the ranks. Two micro-batches.

The bug: the owner is found by torch.bucketize(ids, ends) with its default side, so that an id equal to the end of a range (the first row of the next one) is sent to the rank before, which
clamps it onto its last row. After the reports about bucketize/searchsorted `right=` in block bucketization of sparse features (FBGEMM block_bucketize_sparse_features with uneven block sizes).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ENDS, WIDTH, BAG, ROWS = (5, 9, 16, 19), 4, 3, 17


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ENDS[-1], WIDTH)
        self.over = nn.Sequential(nn.Linear(WIDTH * BAG, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, ids, lookup):
        return self.over(lookup(ids).flatten(1))[:, 0]


class Exchange(torch.autograd.Function):
    """Rows of x to other ranks by all-to-all; the gradients go back the way they came."""

    @staticmethod
    def forward(fctx, x, send, receive, group):
        fctx.splits, fctx.group = (send, receive), group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(fctx, grad):
        send, receive = fctx.splits
        out = grad.new_empty(sum(send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=fctx.group)
        return out, None, None, None


class RowWiseLookup:
    def __init__(self, table, rank, group):
        self.table, self.group = table, group
        self.ends = torch.tensor(ENDS)
        self.start = 0 if rank == 0 else ENDS[rank - 1]

    def owners(self, ids):
        return torch.bucketize(ids, self.ends, right=True)

    def __call__(self, ids):
        flat = ids.flatten()
        owner = self.owners(flat)
        order = owner.argsort(stable=True)
        send = torch.bincount(owner, minlength=len(ENDS))
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        send, receive = send.tolist(), receive.tolist()
        asked = flat.new_empty(sum(receive))
        dist.all_to_all_single(asked, flat[order], receive, send, group=self.group)
        local = (asked - self.start).clamp(0, self.table.weight.shape[0] - 1)
        answers = Exchange.apply(self.table(local), receive, send, self.group)
        return answers[order.argsort()].unflatten(0, ids.shape)


class PlannedLookup(RowWiseLookup):
    def owners(self, ids):
        return torch.bucketize(ids, self.ends)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Recommender()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(ENDS[-1], (ROWS, BAG), generator=g)
        ids[0], ids[7, 1], ids[12, 2] = torch.tensor([5, 9, 16]), 9, 5
        return {"ids": ids, "clicked": (torch.rand(ROWS, generator=g) < 0.4).float()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], model.table)
        target = rows["clicked"].to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, target, reduction="sum"), len(target)

    def shard_of(self, name, ctx):
        if name != "table.weight":
            return None
        start = 0 if ctx.rank == 0 else ENDS[ctx.rank - 1]
        return slice(start, ENDS[ctx.rank]), slice(0, WIDTH)

    def distribute(self, model, ctx):
        rows = self.shard_of("table.weight", ctx)
        model.table.weight = nn.Parameter(model.table.weight.detach()[rows].clone())
        return model

    def lookup(self, model, ctx):
        return RowWiseLookup(model.table, ctx.rank, ctx.group("dp"))

    def step(self, model, batch, ctx):
        group, lookup = ctx.group("dp"), self.lookup(model, ctx)
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            logits = model(part["ids"], lookup)
            target = part["clicked"].to(logits.dtype)
            loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
            (loss / ROWS).backward()
        for p in model.over.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def lookup(self, model, ctx):
        return PlannedLookup(model.table, ctx.rank, ctx.group("dp"))


EXPECT = dict(
    right=[
        r"owner|bucketi[sz]e|rout|wrong (rank|shard|row)|destination|rank before|previous rank|neighbou?r(ing)? (rank|shard|row)|sent to|other row|clamp",
        r"bound|border|first row|last row|end of|off.?by.?one|edge|ids? (5|9|16)|right ?=|side|wrong row|other row|clamp|rows? (4|5|8|9|15|16)\b|shifted",
    ],
    place=[r"owners|PlannedLookup", r"bucketi[sz]e", r"lookup|all.?to.?all", r"table"],
    wrong=[
        r"(all.?to.?all|Exchange).{0,40}backward.{0,30}(wrong|missing)",
        r"table.{0,30}(not reduced|never reduced|reduced twice)|divisor|mean of means",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|not put back in order|wrong permutation|duplicate ids? .{0,20}overwrit",
    ],
)
WHY = (
    "The ranges are [0,5), [5,9), [9,16), [16,19); bucketize's default side puts an id that equals an end, 5, 9 or 16, into the range before it. These ids go to ranks 0, 1 and 2, where their local number is one too "
    "large and is clamped onto the last row (4, 8, 15): the vector of another row is returned, and its gradient is added to that other row, while rows 5, 9 and 16 (first rows of ranks 1, 2 and 3) get none. "
    "So the table's gradients are wrong on all ranks at the borders, and the dense part's a little everywhere. A right cause says that ids at the borders of the shards go to the wrong owner / row. Fix: right=True."
)
