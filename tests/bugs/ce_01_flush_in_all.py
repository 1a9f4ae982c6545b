"""A tabular network (embedded categories, residual blocks, a regression head) that is trained data
parallel over 3 ranks with its own gradient buckets.

The model carries a reconstruction head of an earlier training phase that takes no part in this
loss. Buckets are flushed one after the other, and flushing says whether the whole bucket had
gradients, so that the trainer can warn.

The bug: the flushes are called from within `all(...)` over a generator, which stops at the first
bucket that answers False; the buckets behind it are never sent. After the side effect in a
short-circuited `all()`/`any()` that reviews of home-made reducers turn up again and again (cf.
the buckets that are never flushed in DeepSpeed #4879).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}


class Residual(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.shop = nn.Embedding(5, 3)
        self.weekday = nn.Embedding(7, 2)
        self.enter = nn.Linear(9, 11)
        self.lower = Residual(11, 13)
        self.reconstruction = nn.Linear(11, 4)
        self.upper = Residual(11, 7)
        self.price = nn.Linear(11, 1)

    def forward(self, numbers, shop, weekday):
        x = torch.cat([numbers, self.shop(shop), self.weekday(weekday)], dim=1)
        return self.price(self.upper(self.lower(self.enter(x)))).squeeze(1)


def make_buckets(model, limit):
    """Parameters from the last to the first, as many in a bucket as stay under the limit."""
    buckets, current, size = [], [], 0
    for param in reversed(list(model.parameters())):
        if current and size + param.numel() > limit:
            buckets.append(current)
            current, size = [], 0
        current.append(param)
        size += param.numel()
    return [*buckets, current]


def flush(bucket, group):
    """Sum a bucket's gradients over the group; True if each of its parameters had one."""
    ready = [p for p in bucket if p.grad is not None]
    if ready:
        flat = torch.cat([p.grad.reshape(-1) for p in ready])
        dist.all_reduce(flat, group=group)
        for p, part in zip(ready, flat.split([p.numel() for p in ready]), strict=True):
            p.grad.copy_(part.view_as(p))
    return len(ready) == len(bucket)


def rows_of_rank(batch, rank, world):
    n = len(next(iter(batch.values())))
    lo, hi = rank * n // world, (rank + 1) * n // world
    return {k: v[lo:hi] for k, v in batch.items()}


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.incomplete = 0

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Tabular()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 12)
        return {
            "numbers": torch.randn(11, 4, generator=g),
            "shop": torch.randint(0, 5, (11,), generator=g),
            "weekday": torch.randint(0, 7, (11,), generator=g),
            "price": torch.randn(11, generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["numbers"], rows["shop"], rows["weekday"])
        return F.smooth_l1_loss(out, rows["price"], reduction="sum"), len(out)

    def reduce_gradients(self, buckets, group):
        complete = [flush(bucket, group) for bucket in buckets]
        if not all(complete):
            self.incomplete += 1

    def step(self, model, batch, ctx):
        rows = rows_of_rank(batch, ctx.rank, ctx.world_size)
        total = len(batch["price"])
        half = (len(rows["price"]) + 1) // 2
        for part in (slice(0, half), slice(half, None)):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in rows.items()})
            (loss / total).backward()
        self.reduce_gradients(make_buckets(model, 150), ctx.group("dp"))


class Buggy(Clean):
    def reduce_gradients(self, buckets, group):
        if not all(flush(bucket, group) for bucket in buckets):
            self.incomplete += 1


EXPECT = dict(
    right=[
        r"bucket|flush|all.?reduc|reduc|synchron|exchang|summed",
        (
            r"never|not (all.?)?(reduc|flush|sent|summed|sync|exchang)|unreduced|un-?summed|"
            r"local|missing|skip|short.?circuit|stops|only (its|the) own|own rows|left out|"
            r"without"
        ),
        (
            r"lower|enter|shop|weekday|embedding|earlier|after|behind|remaining|later|rest|"
            r"reconstruction|short.?circuit|early layers|first layers|input side"
        ),
    ],
    place=[
        r"reduce_gradients",
        r"flush",
        r"bucket",
        r"\benter\b|lower|shop|weekday",
        r"reconstruction",
        r"all\(",
    ],
    wrong=[
        r"divided twice|divided by the world|averag(ed|ing) instead of sum",
        r"num(ber)? of micro-?batches|accumulation steps",
        r"reduced twice|summed twice|double.?count",
        r"embedding.*sparse",
    ],
)

WHY = """Buckets go from the last parameter to the first; flush() answers False for the bucket that
holds the unused reconstruction head. all() over a generator stops at the first False, so
the buckets behind that one are never all-reduced. price, upper and what shares a bucket
with them down to the reconstruction head have right gradients; the parameters of the
later buckets (most of lower, enter and both embeddings) keep each rank's own partial sum
and differ between ranks. A right cause says that the gradients of the earlier layers are
not reduced over dp (flush of the remaining buckets skipped after the incomplete bucket).
The fix: call every flush first (a list), then all()."""
