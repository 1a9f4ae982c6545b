"""Image-adaptive 3D colour tables for photo retouching, images cut into strips (cp 2) and rows
(dp 2).

A small network looks at the image, its features are averaged over all pixels (summed over the
strips) and give the weights of three learnt colour tables; their mixture maps every pixel by
trilinear interpolation, a hand-written Function that adds the gradients of the eight corners into
the table.

The bug: the backward counts the corners of a cell in the other order of axes than the table lies
in memory (the offset of the corner has red fastest, the table blue). After the trilinear CUDA
extensions of the 3D-LUT repositories, with table and image in different colour orders.
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}

ROWS, HIGH, WIDE, SIZE, BASES = 5, 5, 4, 4, 3
CORNERS = list(itertools.product((0, 1), repeat=3))


def cell(image):
    """Index of the lowest corner and the place in the cell, per colour."""
    x = image.clamp(0, 1) * (SIZE - 1)
    low = x.floor().clamp(max=SIZE - 2)
    return low.long(), x - low


def corner_weight(frac, corner):
    weight = 1
    for axis, up in enumerate(corner):
        weight = weight * (frac[:, axis] if up else 1 - frac[:, axis])
    return weight


def flat(low):
    return low[:, 0] * SIZE * SIZE + low[:, 1] * SIZE + low[:, 2]


class Trilinear(torch.autograd.Function):
    """table (rows, 3, SIZE^3), image (rows, 3, pixels) -> (rows, 3, pixels)."""

    @staticmethod
    def forward(ctx, table, image):
        low, frac = cell(image)
        ctx.save_for_backward(low, frac)
        out = torch.zeros_like(image)
        for r, g, b in CORNERS:
            index = flat(low) + r * SIZE * SIZE + g * SIZE + b
            value = table.gather(2, index[:, None].expand(-1, 3, -1))
            out += corner_weight(frac, (r, g, b))[:, None] * value
        return out

    @staticmethod
    def backward(ctx, grad):
        low, frac = ctx.saved_tensors
        table = grad.new_zeros(len(grad), 3, SIZE**3)
        for r, g, b in CORNERS:
            index = flat(low) + r * SIZE * SIZE + g * SIZE + b
            share = corner_weight(frac, (r, g, b))[:, None] * grad
            table.scatter_add_(2, index[:, None].expand(-1, 3, -1), share)
        return table, None


class TrilinearKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table, image):
        return Trilinear.forward(ctx, table, image)

    @staticmethod
    def backward(ctx, grad):
        low, frac = ctx.saved_tensors
        table = grad.new_zeros(len(grad), 3, SIZE**3)
        for number in range(8):
            bits = [number >> axis & 1 for axis in range(3)]
            step = sum(up * SIZE**axis for axis, up in enumerate(bits))
            share = corner_weight(frac, bits)[:, None] * grad
            table.scatter_add_(2, (flat(low) + step)[:, None].expand(-1, 3, -1), share)
        return table, None


class SumStrips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Retoucher(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(3, 7, 1)
        self.choose = nn.Linear(7, BASES)
        self.tables = nn.Parameter(torch.randn(BASES, 3, SIZE**3) * 0.5)
        self.group, self.interpolate = None, Trilinear

    def forward(self, image):
        seen = torch.relu(self.look(image)).sum((2, 3))
        if self.group is not None:
            seen = SumStrips.apply(seen, self.group)
        mix = self.choose(seen / (HIGH * WIDE))
        table = torch.einsum("nk,kcs->ncs", mix, self.tables)
        return image + self.interpolate.apply(table, image.flatten(2)).view_as(image)


def retouch_loss(model, rows):
    return (model(rows["image"]) - rows["target"]).square().sum()


class Clean:
    interpolate = Trilinear

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        return Retoucher()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 82)
        shape = (ROWS, 3, HIGH, WIDE)
        return {"image": torch.rand(shape, generator=g), "target": torch.rand(shape, generator=g)}

    def loss_sum(self, model, rows):
        return retouch_loss(model, rows), rows["image"].numel()

    def distribute(self, model, ctx):
        model.group, model.interpolate = ctx.group("cp"), self.interpolate
        return model

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        own = {k: v.tensor_split(2, 2)[ctx.coords["cp"]] for k, v in own.items()}
        (retouch_loss(model, own) / batch["image"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "cp"))


class Buggy(Clean):
    interpolate = TrilinearKernel


EXPECT = dict(
    right=[
        r"trilinear|interpolat|corner|table|lut|scatter",
        r"backward|gradient",
        (
            r"order|axes|axis|stride|transpos|swap|revers|red|blue|layout|offset|"
            r"wrong (corner|entr|index|cell|neighbo)|permut"
        ),
    ],
    place=[r"Trilinear(Kernel)?", r"\bstep\b", r"scatter_add", r"tables", r"corner"],
    wrong=[
        r"SumStrips",
        r"strip(s)?'? (own )?mean|mean over the own",
        r"corner_weight (is )?(wrong|swapped) in the forward",
        r"clamp(s|ed|ing)? (kills|stops|cuts|hides)",
        r"(missing|lacks|never) .{0,30}(reduc|sum).{0,20}cp",
    ],
)
WHY = (
    "TrilinearKernel.backward numbers the corners with red as the lowest bit and steps SIZE**0 "
    "for red, SIZE**2 for blue, while flat() and the forward lay red at SIZE**2 and blue at "
    "SIZE**0. So the share of the corner (1,0,0) is added at (0,0,1) and so on; only the "
    "corners whose red and blue bits agree land rightly. The gradient of the mixed table is "
    "permuted within each cell: tables is wrong, and so are choose and look, which get theirs "
    "through the mixture's weights; the output, the loss and all sums over strips and replicas "
    "are right. A right cause says that the backward scatters to corners in another axis order "
    "than the forward reads. The fix is step = r*SIZE**2 + g*SIZE + b."
)
