"""A click model with a low-rank cross network (DCN-v2 with its non-linear projections: three
fields in tables, x0 * (U tanh(C tanh(V x)) + b) + x, twice), rows over dp (6 and 5 of 11, two
micro-batches) and the seven features over tp (4 and 3): U, V, b and the head's weight are cut.

Bug: the projection of the own features goes through tanh before it is summed over tp; tanh belongs
to the sum. After moving the activation into the projection's module when a cross network was
sharded over features.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, SIZES, WIDTHS, RANK = 11, (5, 4, 3), (3, 2, 2), 3
FEATURES = sum(WIDTHS)
CUTS = [(0, 4), (4, 7)]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Parameter(torch.randn(FEATURES, RANK) * 0.7)
        self.core = nn.Parameter(torch.randn(RANK, RANK) * 0.7)
        self.up = nn.Parameter(torch.randn(FEATURES, RANK) * 0.7)
        self.bias = nn.Parameter(torch.randn(FEATURES) * 0.3)

    def forward(self, x0, x, group=None):
        hidden = torch.tanh(torch.tanh(x @ self.down) @ self.core)
        return x0 * (hidden @ self.up.t() + self.bias) + x


class CrossOfRanks(Cross):
    def forward(self, x0, x, group=None):
        low = torch.tanh(SumOverRanks.apply(x @ self.down, group))
        hidden = CopyToRanks.apply(torch.tanh(low @ self.core), group)
        return x0 * (hidden @ self.up.t() + self.bias) + x


class CrossOfRanksFused(Cross):
    def project(self, x):
        return torch.tanh(x @ self.down)

    def forward(self, x0, x, group=None):
        low = SumOverRanks.apply(self.project(x), group)
        hidden = CopyToRanks.apply(torch.tanh(low @ self.core), group)
        return x0 * (hidden @ self.up.t() + self.bias) + x


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.Embedding(n, w) for n, w in zip(SIZES, WIDTHS, strict=True)]
        )
        self.crosses = nn.ModuleList([Cross(), Cross()])
        self.weight = nn.Parameter(torch.randn(FEATURES))
        self.offset = nn.Parameter(torch.zeros(1))
        self.share = None

    def forward(self, ids):
        x0 = torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1)
        group = None
        if self.share is not None:
            a, b, group = self.share
            x0 = x0[:, a:b]
        x = x0
        for cross in self.crosses:
            x = cross(x0, x, group)
        score = x @ self.weight
        if group is not None:
            score = SumOverRanks.apply(score, group)
        return score + self.offset


class Clean:
    cross = CrossOfRanks

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 33)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 330)
        ids = torch.stack([torch.randint(n, (ROWS,), generator=g) for n in SIZES], 1)
        return {"ids": ids, "click": torch.randint(2, (ROWS,), generator=g).float()}

    def loss_sum(self, model, rows):
        score = model(rows["ids"])
        clicks = rows["click"].to(score.dtype)
        loss = F.binary_cross_entropy_with_logits(score, clicks, reduction="sum")
        return loss, score.shape[0]

    def distribute(self, model, ctx):
        a, b = CUTS[ctx.coords["tp"]]

        def part(p):
            return nn.Parameter(p.detach()[a:b].clone())

        for cross in model.crosses:
            cross.__class__ = self.cross
            cross.down, cross.up, cross.bias = part(cross.down), part(cross.up), part(cross.bias)
        model.weight = part(model.weight)
        model.share = (a, b, ctx.group("tp"))
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(3):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if name.startswith("tables."):
                dist.all_reduce(p.grad, group=ctx.group("tp"))
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    cross = CrossOfRanksFused


EXPECT = dict(
    right=[
        r"tanh|activation|non.?linear",
        r"\bsum|all.?reduc|reduc|partial|tp\b|SumOverRanks",
        r"before|after|order|partial|own features|prior|first|too early|inside|of the sum",
    ],
    place=[
        r"CrossOfRanksFused",
        r"\bproject\b",
        r"SumOverRanks\.apply\(self\.project",
        r"crosses\.\d",
        r"\.down\b",
    ],
    wrong=[
        r"tables?.{0,40}(not|never|twice).{0,20}(reduc|summed)",
        r"CopyToRanks.{0,40}(missing|absent|not applied)",
        r"(core|C).{0,30}(needs|lacks|without).{0,20}(reduc|sum)",
        r"uneven (rows|shares)",
        r"bias.{0,30}(added|counted) (twice|on (every|each) rank)",
    ],
)
WHY = """CrossOfRanksFused.project applies tanh to x @ down of the rank's own features, and only
then the partial projections are summed over tp. tanh is not linear: tanh(a) + tanh(b) is not
tanh(a + b), so the low-rank state of both cross layers is wrong in the forward, and all gradients.
A right cause says the activation is applied to the partial sums, before the all-reduce over tp.
Fix: low = tanh(SumOverRanks.apply(x @ self.down, group))."""
