"""A click model with a deep and cross part over hashed fields (DCN-v2), data parallel over
three ranks (4, 4, 3 of 11 rows), two micro-batches a rank. The loss is scaled by the number of
ranks, and the gradients are averaged: divided by a first factor before the all-reduce and by a
second after it, so that half precision neither under- nor overflows (FSDP's predivide and
postdivide factors).

Bug: the second factor is an integer division, so the two do not multiply to the number of ranks
when that is odd. After `_get_gradient_predivide_factor` as it is copied into trainers and comm
hooks.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FIELDS, BUCKETS, DIM = 11, 3, 7, 3
WIDTH = FIELDS * DIM


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, first, x):
        return first * self.lin(x) + x


class ClickNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(BUCKETS, DIM) for _ in range(FIELDS))
        self.cross = nn.ModuleList(Cross() for _ in range(2))
        self.deep = nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Linear(5, 4))
        self.out = nn.Linear(WIDTH + 4, 1)

    def forward(self, fields):
        first = torch.cat([t(f) for t, f in zip(self.tables, fields.unbind(1), strict=True)], 1)
        x = first
        for cross in self.cross:
            x = cross(first, x)
        return self.out(torch.cat([x, self.deep(first)], 1)).squeeze(1)


class Averager:
    """All-reduce to the mean over ranks, divided on both sides of the sum."""

    def __init__(self, group):
        self.group = group
        self.before, self.after = self.factors(dist.get_world_size(group))

    def factors(self, world):
        before = 1
        while world % before == 0 and world / before > before:
            before *= 2
        return float(before), world / before

    def __call__(self, params, cap=40):
        bucket = []
        for p in params:
            bucket.append(p.grad)
            if sum(g.numel() for g in bucket) >= cap:
                self.reduce(bucket)
                bucket = []
        if bucket:
            self.reduce(bucket)

    def reduce(self, grads):
        flat = torch.cat([g.flatten() for g in grads]) / self.before
        dist.all_reduce(flat, group=self.group)
        if self.after > 1:
            flat /= self.after
        for g, new in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(new.view_as(g))


class TwoStepAverager(Averager):
    def factors(self, world):
        before = 1
        while world % before == 0 and world // before > before:
            before *= 2
        return before, world // before


class Clean:
    averager = Averager

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return ClickNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        return {
            "fields": torch.randint(0, BUCKETS, (ROWS, FIELDS), generator=g),
            "click": (torch.rand(ROWS, generator=g) < 0.4).float(),
        }

    def loss_sum(self, model, rows):
        logit = model(rows["fields"])
        click = rows["click"].to(logit)
        return F.binary_cross_entropy_with_logits(logit, click, reduction="sum"), len(click)

    def distribute(self, model, ctx):
        self.average = self.averager(ctx.group("dp"))
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        world = dist.get_world_size(group)
        own = torch.arange(ROWS).tensor_split(world)[dist.get_rank(group)]
        for part in own.tensor_split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss * world / ROWS).backward()
        self.average(list(model.parameters()))


class Buggy(Clean):
    averager = TwoStepAverager


EXPECT = dict(
    right=[
        r"divi[ds]|factor|average|averag|scal|divisor",
        (
            r"integer|floor|//|trunc|round(s|ed|ing)? down|product|predivid|pre.?divi"
            r"|post.?divi|before.{0,30}after|two (steps|factors)|\b2 (instead of|not"
            r"|rather than) 3|1\.5"
        ),
    ],
    place=[
        r"TwoStepAverager",
        r"Averager",
        r"\bfactors\b",
        r"world // before",
        r"self\.after",
        r"\breduce\b",
    ],
    wrong=[
        r"micro.?batch\w* (count|mean|divis|number)",
        r"(missing|not|never).{0,20}all.?reduc",
        r"(own|local) (row|count).{0,30}(divis|mean|normal)",
        r"last bucket.{0,40}(flush|not|twice)",
        r"embedding.{0,40}(sparse|overwritten)",
    ],
)
WHY = (
    "The sum over ranks is to be divided by world = 3 in two steps, by before = 2 ahead of "
    "the all-reduce and after = 1.5 behind it. TwoStepAverager.factors computes world // "
    "before = 1, an integer division, so the sum is divided by 2 and not by 3 (with 2 or 4 "
    "ranks it would be right). All gradients of all parameters are 1.5 times too large, with "
    "no parameter right. A right cause says that the averaging divides by the wrong number "
    "because the two divide factors do not multiply to the world size (floor division). Fix: "
    "after = world / before."
)
