"""A click model with a row-wise sharded item table on three ranks: the vector of an item is its own row of the big table plus the product of a quotient and a remainder embedding (compositional hashing, m = 5). Items are cut into ranges of 8, 8 and 7; the rank that has an item
computes its whole vector, bags of three are summed over the ranks and each rank goes on with its own rows (4, 3, 3 of ten). Two micro-batches; the gradients of all parameters are summed over the ranks.

The bug: quotient and remainder are taken of the item number after the start of the rank's range has been taken off. After QR-trick embeddings moved into row-wise sharded tables (TorchRec / DLRM qr_embedding_bag users): hash of the local id.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"table": 3}}}}
ROWS, BAG, ITEMS, COLLISIONS, DENSE, WIDTH = 10, 3, 23, 5, 4, 6


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.quotient = nn.Embedding(-(-ITEMS // COLLISIONS), WIDTH)
        self.remainder = nn.Embedding(COLLISIONS, WIDTH)
        self.bottom = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, 7), nn.Tanh(), nn.Linear(7, 1))

    def hashed(self, number):
        return self.quotient(number // COLLISIONS) * self.remainder(number % COLLISIONS)

    def tower(self, dense, bag):
        return self.top(torch.cat([torch.tanh(self.bottom(dense)), bag], 1)).squeeze(1)


class SumToRows(torch.autograd.Function):
    """Sum the ranks' parts of all rows' bags; keep the own rows."""

    @staticmethod
    def forward(fctx, part, lo, hi, group):
        fctx.args = (lo, hi, group, len(part))
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total[lo:hi].clone()

    @staticmethod
    def backward(fctx, grad):
        lo, hi, group, rows = fctx.args
        full = grad.new_zeros(rows, grad.shape[1])
        full[lo:hi] = grad
        dist.all_reduce(full, group=group)
        return full, None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "items": torch.randint(ITEMS, (ROWS, BAG), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g).float(),
        }

    def loss_sum(self, model, rows):
        items = rows["items"]
        bag = (model.items(items) + model.hashed(items)).sum(1)
        out = model.tower(rows["dense"], bag)
        return F.binary_cross_entropy_with_logits(out, rows["click"], reduction="sum"), len(items)

    def lookup(self, model, items, start, end):
        mine = (items >= start) & (items < end)
        local = (items - start).clamp(0, end - start - 1)
        shard = model.items.weight[start:end]
        vectors = F.embedding(local, shard) + model.hashed(items)
        return (vectors * mine[..., None]).sum(1)

    def step(self, model, batch, ctx):
        group = ctx.group("table")
        own = torch.arange(ITEMS).tensor_split(ctx.world_size)[ctx.rank]
        start, end = int(own[0]), int(own[-1]) + 1
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            share = torch.arange(len(part["click"])).tensor_split(ctx.world_size)[ctx.rank]
            lo, hi = int(share[0]), int(share[-1]) + 1
            bag = SumToRows.apply(self.lookup(model, part["items"], start, end), lo, hi, group)
            out = model.tower(part["dense"][lo:hi], bag)
            loss = F.binary_cross_entropy_with_logits(out, part["click"][lo:hi], reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def lookup(self, model, items, start, end):
        mine = (items >= start) & (items < end)
        local = (items - start).clamp(0, end - start - 1)
        shard = model.items.weight[start:end]
        vectors = F.embedding(local, shard) + model.hashed(local)
        return (vectors * mine[..., None]).sum(1)


EXPECT = dict(
    right=[
        r"local|own (range|shard|start|table)|offset|start|relative|shift|from (zero|0)|of the shard|index|indices|(wrong|other|different) (rows?|entries|numbers?|ids?|item)|item (number|id)",
        r"quotient|remainder|hash|collision|bucket",
    ],
    place=[r"lookup", r"hashed", r"quotient|remainder", r"\blocal\b"],
    wrong=[
        r"(gradient|parameter).{0,40}(not|never) reduced|reduced twice|missing all.?reduce|averag",
        r"SumToRows.{0,60}(wrong|missing|twice)|backward of the sum",
        r"divisor|own count|mean of means|last micro.?batch|wrong rows of the batch",
        r"items\.weight (is|has|are) wrong|clamp(ed)? (row|index) (is|are) counted",
    ],
)
WHY = (
    "lookup hands the localised item number to hashed: on ranks 1 and 2 (items from 8 and from 16) quotient and remainder rows are those of number - 8 and number - 16, which m = 5 does not divide, so wrong rows of quotient and remainder are read and learn; rank 0 is right, "
    "and the big table itself is read rightly everywhere. Bags, and with them all gradients, are wrong wherever a bag has an item from 8 on. A right cause says that the quotient / remainder (hash) index is made of the local number. Fix: hash the global number."
)
