"""A radiance field rendered model-parallel along the rays (NeRF-XL): each of three ranks owns a stretch of depth with its own samples (11 samples: 4, 4 and 3), evaluates the field there and composites its stretch;
colours and transmittances of the stretches are then put together into the pixel, over a white background, as all the scenes of a synthetic data set have. All ranks see all rays, two micro-batches, gradients summed over
the ranks (the field is replicated).

The bug: the compositing function of the single-GPU code, with `white_background`, is used for each stretch, so that every stretch is laid over a white background of its own before the stretches are put together;
white shines in between them. After practice: NeRF-XL and the tile/segment compositing of distributed volume renderers, where the background has to be added after the last segment only.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"depth": 3}}}}
RAYS, SAMPLES, WIDTH, CODE = 7, 11, 9, 5


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3 + CODE, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.density = nn.Linear(WIDTH, 1)
        self.colour = nn.Linear(WIDTH + 3, 3)

    def forward(self, points, directions, code):
        code = code[:, None].expand(-1, points.shape[1], -1)
        h = torch.tanh(self.inner(torch.cat([points, code], -1)))
        h = h + torch.tanh(self.hidden(h))
        sigma = F.softplus(self.density(h).squeeze(-1))
        views = directions[:, None].expand_as(points)
        return sigma, torch.sigmoid(self.colour(torch.cat([h, views], -1)))


def composite(sigma, rgb, widths):
    """Colour of a stretch of samples as seen from its front, and what light passes through it."""
    tau = sigma * widths
    before = torch.exp(-(tau.cumsum(1) - tau))
    weights = before * (1 - torch.exp(-tau))
    return (weights[..., None] * rgb).sum(1), torch.exp(-tau.sum(1))


class GatherStretches(torch.autograd.Function):
    """[ranks, rays, 4] on each rank; all ranks go on to compute the same, and each counts it once."""

    @staticmethod
    def forward(fctx, own, group):
        fctx.me = dist.get_rank(group)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(fctx, grad):
        return grad[fctx.me].contiguous(), None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        depths = torch.rand(RAYS, SAMPLES + 1, generator=g).add(0.1).cumsum(1) / 3
        return {
            "origins": torch.randn(RAYS, 3, generator=g) / 3,
            "directions": F.normalize(torch.randn(RAYS, 3, generator=g), dim=1),
            "code": torch.randn(RAYS, CODE, generator=g),
            "depths": depths,
            "pixels": torch.rand(RAYS, 3, generator=g),
        }

    @staticmethod
    def samples(rows, lo, hi):
        edges = rows["depths"][:, lo : hi + 1]
        middle = (edges[:, 1:] + edges[:, :-1]) / 2
        points = rows["origins"][:, None] + middle[..., None] * rows["directions"][:, None]
        return points, edges[:, 1:] - edges[:, :-1]

    def loss_sum(self, model, rows):
        points, widths = self.samples(rows, 0, SAMPLES)
        rgb, through = composite(*model(points, rows["directions"], rows["code"]), widths)
        return (rgb + through[:, None] - rows["pixels"]).square().sum(), len(rgb)

    def render_stretch(self, model, rows, lo, hi):
        points, widths = self.samples(rows, lo, hi)
        return composite(*model(points, rows["directions"], rows["code"]), widths)

    def join(self, stretches):
        rgb, through = stretches[..., :3], stretches[..., 3]
        pixel, light = rgb[0], through[0]
        for c, t in zip(rgb[1:], through[1:]):
            pixel, light = pixel + light[:, None] * c, light * t
        return pixel + light[:, None]

    def step(self, model, batch, ctx):
        group = ctx.group("depth")
        own = torch.arange(SAMPLES).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for n in range(2):
            rows = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            rgb, through = self.render_stretch(model, rows, lo, hi)
            stretches = GatherStretches.apply(torch.cat([rgb, through[:, None]], 1), group)
            pixel = self.join(stretches)
            ((pixel - rows["pixels"]).square().sum() / RAYS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def render_stretch(self, model, rows, lo, hi):
        points, widths = self.samples(rows, lo, hi)
        rgb, through = composite(*model(points, rows["directions"], rows["code"]), widths)
        return rgb + through[:, None], through  # white background

    def join(self, stretches):
        rgb, through = stretches[..., :3], stretches[..., 3]
        pixel, light = rgb[0], through[0]
        for c, t in zip(rgb[1:], through[1:]):
            pixel, light = pixel + light[:, None] * c, light * t
        return pixel


EXPECT = dict(
    right=[
        r"forward|value|output|stretch|colou?r|rgb|background|render|computed|activation|term",
        r"background|white|through|transmittance|added (on|by|in|at) (each|every|all)|per (rank|segment|stretch)"
        r"|(each|every|own|local).{0,60}(rank|stretch|segment|part|share)|not (in|of) the (reference|single)"
        r"|differs.{0,60}(forward|value)|extra (term|addend|addition)",
    ],
    place=[r"render_stretch", r"\bjoin\b", r"rgb|through|background", r"GatherStretches|stretches"],
    wrong=[
        r"parameters?.{0,40}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"(backward|adjoint) of GatherStretches|GatherStretches.{0,40}(backward|adjoint).{0,30}(wrong|missing|should)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|divisor|mean of means|wrong (group|rows)",
        r"detached|without gradient|no gradient",
    ],
)
WHY = (
    "Each rank adds `through` (white times what passes its stretch) to the colour of its own stretch before the stretches are gathered, so the pixel is sum over r of T_<r (C_r + T_r) instead of sum T_<r C_r + T_all: "
    "the first and the second rank's stretches contribute two more whites, weighted by the light behind them. Forward and loss are wrong, alike on all three ranks, and so are the gradients of density (mostly) and colour of "
    "all ranks; gather, its backward and the final sum are right. A right cause says that the value of the stretches (render_stretch, the rgb) differs because the background is added per stretch/rank. Fix: add it once in "
    "join, with the light left after the last stretch."
)
