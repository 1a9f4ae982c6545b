"""A click predictor: two embedding tables with their rows cut over three ranks (model parallel), bags of unlike lengths pooled to their
mean, a dense part in data parallelism with 4, 4 and 3 rows. After reports on row-wise sharded EmbeddingBag with mode="mean": sums of
parts and the division by the length are done in one autograd.Function, whose backward must divide by the same length.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, DENSE, WIDTH, LONG = 11, 7, 6, 5
SIZES = {"history": 23, "tags": 10}


class MeanBags(torch.autograd.Function):
    """Means of bags over a table of which this rank holds some rows; the ids of all ranks' rows go in, own rows' means come out."""

    @staticmethod
    def forward(ctx, table, ids, start, mine, group):
        hit = (ids >= start) & (ids < start + len(table))
        at = torch.where(hit, ids - start, 0)
        pooled = (table[at] * hit[..., None]).sum(1)
        dist.all_reduce(pooled, group=group)
        length = (ids >= 0).sum(1)
        ctx.save_for_backward(at, hit, length)
        ctx.rest = mine, group, table.shape
        return (pooled / length[:, None])[mine]

    @staticmethod
    def spread(grad, at, hit, divisor, mine, group, shape):
        whole = grad.new_zeros(len(at), shape[1])
        whole[mine] = grad
        dist.all_reduce(whole, group=group)
        each = (whole / divisor[:, None])[:, None] * hit[..., None]
        return grad.new_zeros(shape).index_add_(0, at.flatten(), each.flatten(0, 1)), *[None] * 4

    @staticmethod
    def backward(ctx, grad):
        at, hit, length = ctx.saved_tensors
        return MeanBags.spread(grad, at, hit, length, *ctx.rest)


class HitBags(MeanBags):
    @staticmethod
    def backward(ctx, grad):
        at, hit, _ = ctx.saved_tensors
        return MeanBags.spread(grad, at, hit, hit.sum(1).clamp(min=1), *ctx.rest)


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterDict(
            {k: nn.Parameter(torch.randn(n, WIDTH) * 0.7) for k, n in SIZES.items()}
        )
        self.bottom = nn.Sequential(nn.Linear(DENSE, 9), nn.SiLU(), nn.Linear(9, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + 3, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, dense, history, tags):
        d = self.bottom(dense)
        cross = torch.stack([(d * history).sum(1), (d * tags).sum(1), (history * tags).sum(1)], 1)
        return self.top(torch.cat([d, cross], 1)).squeeze(1)


def click_loss(logits, clicked):
    return F.binary_cross_entropy_with_logits(logits, clicked.to(logits.dtype), reduction="sum")


class Clean:
    bags = MeanBags

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clicks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        out = {"dense": torch.randn(ROWS, DENSE, generator=g)}
        for k, n in SIZES.items():
            length = torch.randint(1, LONG + 1, (ROWS, 1), generator=g)
            ids = torch.randint(n, (ROWS, LONG), generator=g)
            out[k] = ids.masked_fill(torch.arange(LONG) >= length, -1)
        return out | {"clicked": torch.rand(ROWS, generator=g) < 0.4}

    def loss_sum(self, model, rows):
        pooled = {}
        for k in SIZES:
            some = rows[k] >= 0
            each = model.tables[k][rows[k].clamp(min=0)] * some[..., None]
            pooled[k] = each.sum(1) / some.sum(1)[:, None]
        return click_loss(model(rows["dense"], **pooled), rows["clicked"]), len(rows["dense"])

    def distribute(self, model, ctx):
        for k in SIZES:
            part = model.tables[k].detach().tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
            model.tables[k] = nn.Parameter(part.clone())
        return model

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        mine = torch.arange(ROWS).tensor_split(n)[me]
        pooled = {}
        for k, size in SIZES.items():
            start = int(torch.arange(size).tensor_split(n)[me][0])
            pooled[k] = self.bags.apply(model.tables[k], batch[k], start, mine, group)
        logits = model(batch["dense"][mine], **pooled)
        (click_loss(logits, batch["clicked"][mine]) / ROWS).backward()
        for part in (model.bottom, model.top):
            for p in part.parameters():
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    bags = HitBags


EXPECT = dict(
    right=[
        r"tables|history|tags|embedding",
        r"backward|rows?|factor|before anything is reduced|own module|autograd.?function|hitbags",
    ],
    place=[r"tables|history|tags|hitbags", r"rank|rows?"],
    wrong=[
        r"forward is (wrong|right up to)|forward goes wrong",
        r"(bottom|top)\S* (is|are) wrong",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"rows? (are |is )?(read twice|never read|missing from the batch)",
        r"reduc\w+ of .{0,30}(tables|history|tags)\S* .{0,20}(missing|never)",
    ],
)
WHY = (
    "The backward of the pooled means divides the gradient of a bag by the number of its ids that this rank holds, not by the length of the "
    "bag, so what a bag gives to its ids is too large wherever the bag has ids on other ranks, by length / own hits, another factor for each bag. "
    "The forward is right, `bottom` and `top` are right; only the two tables are wrong, on all ranks, other rows by other factors."
)
