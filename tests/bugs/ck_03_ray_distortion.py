"""A small radiance field; the ten samples of every ray are cut over three ranks (4, 3, 3). The
optical depth in front of a shard comes by a differentiable exclusive prefix sum over ranks, the
colour is summed over ranks, and the loss has the distortion term of mip-NeRF 360, sum_ij w_i
w_j |s_i - s_j| + sum_i w_i^2 d_i / 3.

Bug: pairs within a shard are summed over i and j, pairs of a sample with the samples of earlier
ranks only once. After linear-time distortion losses (torch_efficient_distloss) put to shards.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"samples": 3}}}}
RAYS, SAMPLES, WIDTH = 5, 10, 6


def gather(x, group):
    out = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, x.contiguous(), group=group)
    return out


class Before(torch.autograd.Function):
    """The sum over the ranks before this one."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return torch.stack([torch.zeros_like(x), *gather(x, group)[: dist.get_rank(group)]]).sum(0)

    @staticmethod
    def backward(ctx, g):
        later = gather(g, ctx.group)[dist.get_rank(ctx.group) + 1 :]
        return torch.stack([torch.zeros_like(g), *later]).sum(0), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.density = nn.Linear(WIDTH, 1)
        self.colour = nn.Linear(WIDTH, 3)

    def forward(self, points):
        h = self.trunk(points)
        return F.softplus(self.density(h)).squeeze(-1), torch.sigmoid(self.colour(h))


def within(w, s, width):
    gap = (s[:, :, None] - s[:, None, :]).abs()
    return (w[:, :, None] * w[:, None, :] * gap).sum() + (w.square() * width).sum() / 3


def weights(sigma, width, front):
    depth = sigma * width
    through = torch.exp(-(front + depth.cumsum(-1) - depth))
    return through * (1 - torch.exp(-depth))


class Clean:
    strength = 0.5

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        edges = torch.rand(RAYS, SAMPLES + 1, generator=g).cumsum(-1)
        return {
            "origin": torch.randn(RAYS, 3, generator=g),
            "way": F.normalize(torch.randn(RAYS, 3, generator=g), dim=-1),
            "edges": edges,
            "pixel": torch.rand(RAYS, 3, generator=g),
        }

    def parts(self, rows, own=slice(None)):
        edges = rows["edges"]
        s, width = ((edges[:, 1:] + edges[:, :-1]) / 2)[:, own], edges.diff(dim=-1)[:, own]
        return rows["origin"][:, None] + s[..., None] * rows["way"][:, None], s, width

    def loss_sum(self, model, rows):
        points, s, width = self.parts(rows)
        sigma, colour = model(points)
        w = weights(sigma, width, 0.0)
        seen = (w[..., None] * colour).sum(1)
        loss = (seen - rows["pixel"]).square().sum() + self.strength * within(w, s, width)
        return loss, rows["pixel"].shape[0]

    def distortion(self, w, s, width, group):
        mass, moment = Before.apply(torch.stack([w.sum(-1), (w * s).sum(-1)]), group)
        between = (w * (s * mass[:, None] - moment[:, None])).sum()
        return within(w, s, width) + 2 * between

    def step(self, model, batch, ctx):
        group = ctx.group("samples")
        own = torch.arange(SAMPLES).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        for lo in range(0, RAYS, 3):
            rows = {k: v[lo : lo + 3] for k, v in batch.items()}
            points, s, width = self.parts(rows, own)
            sigma, colour = model(points)
            front = Before.apply((sigma * width).sum(-1), group)
            w = weights(sigma, width, front[:, None])
            seen = Reduce.apply((w[..., None] * colour).sum(1), group)
            loss = (seen - rows["pixel"]).square().sum()
            loss = loss + self.strength * self.distortion(w, s, width, group)
            (loss / RAYS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def distortion(self, w, s, width, group):
        mass, moment = Before.apply(torch.stack([w.sum(-1), (w * s).sum(-1)]), group)
        earlier = s * mass[:, None] - moment[:, None]
        return within(w, s, width) + (w * earlier).sum()


EXPECT = dict(
    right=[
        r"distort|pair|between|cross.?(shard|rank|term)|\bearlier\b",
        (
            r"(cross|between|other|earlier|previous|across|inter|different).{0,30}(shard"
            r"|rank|term|sample|pair)|earlier"
        ),
        r"once|half|factor (of )?(2|two)|\b2 ?[*x]|twice|doubl|one direction|one side|0\.5|symmetr",
    ],
    place=[
        r"distortion",
        r"\bearlier\b|\bbetween\b",
        r"\bmass\b|\bmoment\b",
        r"density",
        r"within",
    ],
    wrong=[
        r"transmittance.{0,50}(wrong|missing|own shard)",
        r"Before\.backward.{0,40}(wrong|earlier)",
        r"colou?r.{0,40}(twice|not (reduced|summed))",
        r"(missing|not|never).{0,20}all.?reduc",
        r"\bwithin\b.{0,40}(twice|double|too large)",
    ],
)
WHY = (
    "The distortion term sums over ordered pairs (i, j), so every unordered pair counts "
    "twice. within() does so inside a shard, but Buggy.distortion adds the pairs of own "
    "samples with those of earlier ranks only once: the factor 2 of the cross-shard part is "
    "missing. Wrong are the gradients of density and of the trunk (all that the weights w "
    "depend on); the colour layer, which only the colour loss reaches, is right. A right "
    "cause says that the cross-rank pairs of the distortion loss are counted once / with half"
    " the weight. Fix: 2 * (w * earlier).sum()."
)
