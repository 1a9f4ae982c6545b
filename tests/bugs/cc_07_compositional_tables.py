"""Click prediction with compositional (quotient-remainder) embeddings: an item's vector is Q[id // 5] * R[id % 5]. Both tables are cut by rows over three ranks of an embedding group (masked lookup, then a sum over the
group); two data-parallel replicas of the group each take half of the rows, in two micro-batches. The dense part is replicated; all gradients are summed over the replicas.

The bug: the two masked lookups are multiplied first and the product is summed over the group (one collective instead of two). A product of partial results is not a partial product: items whose quotient row and remainder row lie on
different ranks get the zero vector and no gradient. After DLRM's QREmbeddingBag (operation="mult") under row-wise sharding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "rows": 3}}}}
ROWS, ITEMS, BUCKETS, WIDTH, HISTORY = 9, 38, 5, 6, 4


class SumOverGroup(torch.autograd.Function):
    """Sum of the partial lookups; what follows is replicated, so that the gradient passes as it is."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.quotient = nn.Parameter(torch.randn(-(-ITEMS // BUCKETS), WIDTH))
        self.remainder = nn.Parameter(1 + 0.5 * torch.randn(BUCKETS, WIDTH))
        self.user = nn.Linear(3, WIDTH)
        self.top = nn.Sequential(nn.Linear(2 * WIDTH, 9), nn.ReLU(), nn.Linear(9, 1))

    def forward(self, user, items, lookup):
        bag = lookup(self, items).sum(1)
        return self.top(torch.cat([torch.tanh(self.user(user)), bag], -1))[:, 0]


def whole_lookup(model, items):
    return model.quotient[items // BUCKETS] * model.remainder[items % BUCKETS]


def masked_rows(table, index, start):
    """Rows of the own part of a table, zero where another rank has them."""
    local = index - start
    mine = (local >= 0) & (local < len(table))
    return table[local.clamp(0, len(table) - 1)] * mine[..., None]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randn(ROWS, 3, generator=g),
            "items": torch.randint(ITEMS, (ROWS, HISTORY), generator=g),
            "click": torch.randint(2, (ROWS,), generator=g).float(),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["user"], rows["items"], whole_lookup)
        return F.binary_cross_entropy_with_logits(logits, rows["click"], reduction="sum"), len(
            logits
        )

    def distribute(self, model, ctx):
        for name in ("quotient", "remainder"):
            full = getattr(model, name).detach()
            own = torch.arange(len(full)).tensor_split(ctx.axes["rows"])[ctx.coords["rows"]]
            setattr(model, name, nn.Parameter(full[own].clone()))
            setattr(model, f"{name}_start", int(own[0]))
        return model

    def lookup(self, model, items, group):
        q = masked_rows(model.quotient, items // BUCKETS, model.quotient_start)
        r = masked_rows(model.remainder, items % BUCKETS, model.remainder_start)
        return SumOverGroup.apply(q, group) * SumOverGroup.apply(r, group)

    def step(self, model, batch, ctx):
        group = ctx.group("rows")
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in rows.items()}
            logits = model(
                part["user"], part["items"], lambda m, items: self.lookup(m, items, group)
            )
            loss = F.binary_cross_entropy_with_logits(logits, part["click"], reduction="sum")
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def lookup(self, model, items, group):
        q = masked_rows(model.quotient, items // BUCKETS, model.quotient_start)
        r = masked_rows(model.remainder, items % BUCKETS, model.remainder_start)
        return SumOverGroup.apply(q * r, group)


EXPECT = dict(
    right=[
        r"product|multipl|\bmul|non.?linear|partial|before (the |it |being )?(sum|reduc)|lookup|embedding|masked",
        r"before.{0,60}(sum|reduc|all.?reduce)|after.{0,40}product|partial|not (yet )?(summed|reduced|whole|complete)|missing.{0,40}reduc|one (collective|reduction|all.?reduce)|different ranks|own (rows|part|shard)|zero|incomplete|sum of products|product of sums|un.?reduced",
    ],
    place=[
        r"\blookup\b",
        r"SumOverGroup",
        r"q \* r|\bq\b.{0,20}\br\b",
        r"quotient|remainder",
        r"masked_rows",
    ],
    wrong=[
        r"over (dp|the replicas).{0,40}(missing|not reduced|twice)",
        r"divisor|denominator|mean of means|micro.?batch(es)?.{0,30}(lost|dropped|overwritten)",
        r"(parameter|weight) gradients?.{0,30}(not|never) reduced|counted (three|3|twice)",
    ],
)
WHY = (
    "lookup multiplies the masked rows of the quotient and of the remainder table on each rank and sums the product over the group, where each factor has to be summed before the product. An item whose two rows are owned by two ranks "
    "(about two thirds of them) comes out as zero on all ranks, so the forward, the loss and all gradients are wrong on all six ranks. A right cause says that the product of partial lookups is taken before the reduction over the "
    "embedding group. Fix: SumOverGroup on each factor, then multiply."
)
