"""Debiased contrastive learning (Chuang et al.) of two views under FSDP2 with three ranks: embeddings of the second view are gathered over the ranks with gradient, every own row has all other rows' second views for
negatives, and the estimator of the true negatives' mass is (sum of negatives - n tau e^pos) / (1 - tau), where n is the number of negatives. One batch of nine rows; FSDP averages, so the loss is times world size.

The bug: n in the correction is taken from the rank's own embeddings (2 of the own rows) although the sum runs over the gathered ones (8): the correction for false negatives is four times too small.
After ports of DCL's get_negative_mask / `N = batch_size * 2 - 2` to gathered negatives, where batch_size stayed the local one.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
FEATURES, WIDTH, SPACE, ROWS = 6, 9, 5, 9
TAU_PLUS, TEMPERATURE = 0.1, 0.8


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        self.projector = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, SPACE)
        )

    def forward(self, x):
        return F.normalize(self.projector(self.body(x)), dim=-1)


class GatherRows(torch.autograd.Function):
    """All ranks' rows on each rank; the gradients of all ranks for the own rows are summed."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=fctx.group)
        return grad.chunk(dist.get_world_size(fctx.group))[dist.get_rank(fctx.group)], None


def debiased_loss(similarity, places, negatives):
    """similarity: [own rows, all rows]; places: where in all rows the own ones are."""
    e = (similarity / TEMPERATURE).exp()
    positive = e.gather(1, places[:, None])[:, 0]
    others = e.sum(1) - positive
    mass = (others - negatives * TAU_PLUS * positive) / (1 - TAU_PLUS)
    mass = mass.clamp(min=negatives * math.exp(-1 / TEMPERATURE))
    return (torch.log(positive + mass) - torch.log(positive)).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, FEATURES, generator=g)
        return {"a": x, "b": x + 0.7 * torch.randn(ROWS, FEATURES, generator=g)}

    def loss_sum(self, model, rows):
        """rows: indices into the batch, as the negatives are all its rows."""
        batch = self.batch()
        a, b = model(batch["a"][rows]), model(batch["b"])
        return debiased_loss(a @ b.T, rows, ROWS - 1), len(rows)

    def distribute(self, model, ctx):
        for part in (model.body, model.projector):
            fully_shard(part, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def contrast(self, a, b, ctx):
        everyone = GatherRows.apply(b, ctx.group("dp"))
        places = ctx.rank * len(a) + torch.arange(len(a))
        return debiased_loss(a @ everyone.T, places, len(everyone) - 1)

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        a, b = model(torch.cat([mine["a"], mine["b"]])).chunk(2)
        (self.contrast(a, b, ctx) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def contrast(self, a, b, ctx):
        everyone = GatherRows.apply(b, ctx.group("dp"))
        batch_size = len(a)
        places = ctx.rank * batch_size + torch.arange(batch_size)
        return debiased_loss(a @ everyone.T, places, batch_size - 1)


EXPECT = dict(
    right=[
        r"negative|count|number|batch.?size|\bn\b|correction|debias|own rows|local",
        r"own|local|per.?rank|each rank|of (the|its|a) (rank|shard)|2\b.{0,30}8\b|8\b.{0,30}2\b|instead of (all|global|8)|global|everyone|gathered|batch_size",
    ],
    place=[r"contrast|debiased_loss", r"negatives|batch_size", r"mass|correction|clamp", r"loss"],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|wrong group",
        r"GatherRows.{0,60}(wrong|missing|without)|gradient.{0,30}(through|of) the gather.{0,30}(lost|missing)|negatives of (the )?other ranks.{0,30}(missing|ignored)",
        r"FSDP.{0,30}(divid|averag).{0,30}(twice|wrong|missing)|world.?size (factor )?(is )?(missing|wrong)",
    ],
)
WHY = (
    "The estimator subtracts n tau e^pos from the sum over all eight negatives, and n is to be eight, the number of negatives gathered from the three ranks; each rank takes its own three rows less one, n = 2. "
    "So on all ranks the correction (and the lower limit of the clamp) is four times too small, and the gradients of all weights are wrong by some per cent, in no simple ratio. Gather, its adjoint, positives and FSDP's average times world size are right. "
    "A right cause says that the number of negatives is that of the own rank's rows instead of the global one. Fix: len(everyone) - 1."
)
