"""Multiresolution hash encoding (Instant-NGP) in two dimensions with five levels spread over the tensor axis (3 and 2) of two ranks, times two data ranks; the levels' features are gathered, and the small MLP is computed
by all tensor ranks alike. The lookup is an autograd Function that keeps the points only and makes corners and weights anew in the backward, as the fused encoders do. Two micro-batches.

The bug: the backward enumerates the corners by itertools.product (last coordinate fastest) for the table slots but takes the weights in the bit order of the forward (first coordinate fastest): the corners (1,0) and (0,1)
get each other's weight. After index-order reports on hash grid kernels (tiny-cuda-nn / torch-ngp ports) where forward and backward loop over corners differently.
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "level": 2}}}}
RESOLUTIONS, SLOTS, FEATURES, ROWS = (2, 3, 5, 8, 12), 23, 2, 14


def corner_slots(points, resolution, corner):
    cell = (points * resolution).floor().long()
    x, y = (cell + torch.tensor(corner)).unbind(-1)
    return (x ^ (y * 2654435761)) % SLOTS


def corner_weights(points, resolution):
    """Bilinear weights of the corners (0,0), (1,0), (0,1), (1,1)."""
    f = points * resolution
    f = f - f.floor()
    u, v = f.unbind(-1)
    return torch.stack([(1 - u) * (1 - v), u * (1 - v), (1 - u) * v, u * v], -1)


CORNERS = [(n & 1, n >> 1) for n in range(4)]


class GridLookup(torch.autograd.Function):
    @staticmethod
    def forward(fctx, table, points, resolution):
        fctx.save_for_backward(points)
        fctx.resolution, fctx.shape = resolution, table.shape
        weights = corner_weights(points, resolution)
        return sum(
            weights[:, n, None] * table[corner_slots(points, resolution, corner)]
            for n, corner in enumerate(CORNERS)
        )

    @staticmethod
    def backward(fctx, grad):
        (points,) = fctx.saved_tensors
        weights = corner_weights(points, fctx.resolution)
        out = grad.new_zeros(fctx.shape)
        for n, corner in enumerate(CORNERS):
            slots = corner_slots(points, fctx.resolution, corner)
            out.index_add_(0, slots, weights[:, n, None] * grad)
        return out, None, None


class FusedGridLookup(torch.autograd.Function):
    @staticmethod
    def forward(fctx, table, points, resolution):
        fctx.save_for_backward(points)
        fctx.resolution, fctx.shape = resolution, table.shape
        slots = torch.stack([corner_slots(points, resolution, c) for c in CORNERS], -1)
        return (corner_weights(points, resolution)[..., None] * table[slots]).sum(1)

    @staticmethod
    def backward(fctx, grad):
        (points,) = fctx.saved_tensors
        corners = itertools.product((0, 1), repeat=2)
        slots = torch.stack([corner_slots(points, fctx.resolution, c) for c in corners], -1)
        parts = corner_weights(points, fctx.resolution)[..., None] * grad[:, None]
        out = grad.new_zeros(fctx.shape)
        return out.index_add_(0, slots.flatten(), parts.flatten(0, 1)), None, None


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(SLOTS, FEATURES) for _ in RESOLUTIONS)
        self.mlp = nn.Sequential(
            nn.Linear(FEATURES * len(RESOLUTIONS), 7), nn.Tanh(), nn.Linear(7, 3)
        )

    def encode(self, points, levels, lookup=GridLookup):
        return torch.cat([lookup.apply(self.tables[n], points, RESOLUTIONS[n]) for n in levels], -1)

    def forward(self, points):
        return self.mlp(self.encode(points, range(len(RESOLUTIONS))))


class GatherLevels(torch.autograd.Function):
    """All levels' features on each rank of the level axis, which go on alike: own slice on the way back."""

    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place = lo * FEATURES, hi * FEATURES
        full = own.new_zeros(len(own), FEATURES * len(RESOLUTIONS))
        full[:, slice(*fctx.place)] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        return grad[:, slice(*fctx.place)], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "points": torch.rand(ROWS, 2, generator=g),
            "colour": torch.rand(ROWS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["points"])
        return (out - rows["colour"]).square().sum(), len(out)

    def encode(self, model, points, levels):
        return model.encode(points, levels)

    def step(self, model, batch, ctx):
        levels = torch.arange(len(RESOLUTIONS)).tensor_split(ctx.axes["level"])
        levels = levels[ctx.coords["level"]].tolist()
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            own = self.encode(model, part["points"], levels)
            features = GatherLevels.apply(own, levels[0], levels[-1] + 1, ctx.group("level"))
            loss = (model.mlp(features) - part["colour"]).square().sum()
            (loss / ROWS).backward()
        for p in model.tables:
            dist.all_reduce(p.grad, group=ctx.group("dp", "level"))
        for p in model.mlp.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def encode(self, model, points, levels):
        return model.encode(points, levels, FusedGridLookup)


EXPECT = dict(
    right=[
        r"backward|adjoint|derivative|vjp|way back|gradient",
        r"GridLookup|lookup|corner|slot|weight.{0,30}order|custom (autograd )?function|autograd(\.| )?Function|encod|scatter",
    ],
    place=[r"FusedGridLookup", r"tables?", r"index_add|slots|corners", r"\bencode\b"],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|counted (twice|two times)|wrong group",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|divisor|duplicate.{0,30}overwrit",
        r"forward (is|differs).{0,20}(wrong|differ)?|mlp.{0,40}(wrong|not reduced)|GatherLevels.{0,40}(wrong|missing)",
    ],
)
WHY = (
    "FusedGridLookup's backward pairs the slots of the corners in the order (0,0), (0,1), (1,0), (1,1) with the weights in the order (0,0), (1,0), (0,1), (1,1): the two corners in the middle swap their weights. "
    "Forward, loss and the MLP's gradients are right on all ranks; the gradients of all five tables are wrong on all of them, each level's by its owner's backward, with the right sum over the slots. "
    "A right cause says that the backward of the lookup Function is not the adjoint of its forward (corners and weights in unlike order). Fix: one order of corners for both."
)
