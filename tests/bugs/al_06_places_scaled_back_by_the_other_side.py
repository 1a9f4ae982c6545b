"""Deformable sampling under DDP on three ranks, two micro-batches each: queries look at three places of a feature map, given as (x, y) in units of the map's width and height and moved by learned offsets; a bilinear sampler of our own (a
Function with gradients for the map and for the places) reads the values. Images have different sizes; rank 0 happens to have square ones only.

The bug: the backward of the sampler turns gradients per pixel into gradients per unit with the height for x and the width for y. The same for square maps. After the mix-up of (x, y) and (y, x) in lucidrains/deformable-attention issue
6, moved into the backward (compare ms_deform_attn_backward in Cambricon/mlu-ops PR 533).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CANVAS, CHANNELS, WIDTH, PLACES = 8, 2, 4, 3
SIZES = [(6, 6), (5, 5), (7, 7), (4, 8), (5, 7), (6, 6), (8, 3), (7, 4), (6, 8), (5, 5)]
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 6)], [(6, 7), (7, 10)]]


class Sample(torch.autograd.Function):
    """Bilinear values (P, C) of a map (C, H, W) at places (P, 2), zero outside."""

    @staticmethod
    def corners(values, places):
        height, width = values.shape[1:]
        x, y = places[:, 0] * width - 0.5, places[:, 1] * height - 0.5
        left, top = x.floor(), y.floor()
        for dx in (0, 1):
            for dy in (0, 1):
                column, row = left + dx, top + dy
                inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
                wx, wy = 1 - (x - column).abs(), 1 - (y - row).abs()
                at = row.clamp(0, height - 1).long(), column.clamp(0, width - 1).long()
                yield at, inside.to(values.dtype), wx, wy, 2 * dx - 1, 2 * dy - 1

    @staticmethod
    def forward(ctx, values, places, swapped):
        ctx.save_for_backward(values, places)
        ctx.swapped = swapped
        result = values.new_zeros(len(places), len(values))
        for (row, column), inside, wx, wy, _, _ in Sample.corners(values, places):
            result += values[:, row, column].t() * (inside * wx * wy)[:, None]
        return result

    @staticmethod
    def backward(ctx, grad):
        values, places = ctx.saved_tensors
        height, width = values.shape[1:]
        if ctx.swapped:
            height, width = width, height
        to_values, to_places = torch.zeros_like(values), torch.zeros_like(places)
        for (row, column), inside, wx, wy, sx, sy in Sample.corners(values, places):
            part = grad * (inside * wx * wy)[:, None]
            to_values.index_put_(
                (torch.arange(len(values))[:, None], row[None], column[None]),
                part.t(),
                accumulate=True,
            )
            along = (grad * values[:, row, column].t()).sum(1) * inside
            to_places[:, 0] += along * wy * sx * width
            to_places[:, 1] += along * wx * sy * height
        return to_values, to_places, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.query = nn.Parameter(torch.randn(WIDTH))
        self.reference = nn.Parameter(torch.rand(PLACES, 2) * 0.5 + 0.25)
        self.offsets = nn.Linear(WIDTH, 2 * PLACES)
        self.weights = nn.Linear(WIDTH, PLACES)
        self.out = nn.Linear(WIDTH, 2)
        self.own, self.swapped = False, False

    def one(self, image):
        values = torch.tanh(self.backbone(image[None]))[0]
        query = self.query + values.mean((1, 2))
        places = self.reference + 0.3 * torch.tanh(self.offsets(query)).view(PLACES, 2)
        if self.own:
            read = Sample.apply(values, places, self.swapped)
        else:
            grid = (2 * places - 1)[None, None]
            read = F.grid_sample(values[None], grid, align_corners=False)[0, :, 0].t()
        return self.out(self.weights(query).softmax(-1) @ read)

    def forward(self, images, sizes):
        return torch.stack([self.one(i[:, :h, :w]) for i, (h, w) in zip(images, sizes.tolist())])


class Clean:
    swapped = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(len(SIZES), CHANNELS, CANVAS, CANVAS, generator=g),
            "size": torch.tensor(SIZES),
            "centre": torch.randn(len(SIZES), 2, generator=g),
        }

    def loss_sum(self, model, rows):
        error = model(rows["image"], rows["size"]) - rows["centre"]
        return error.square().sum(), len(error)

    def distribute(self, model, ctx):
        model.own, model.swapped = True, self.swapped
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / len(SIZES)).backward()


class Buggy(Clean):
    swapped = True


EXPECT = dict(
    right=[
        r"(?i)sampl|places?|reference|offsets?|location",
        r"(?i)backward|adjoint|gradient (of|that|for|to|is|handed)|hands? (back|on)",
    ],
    place=[r"(?i)Sample|sampl|places?|reference|offsets|location"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own (rows|count|number)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)\brank 0 (is|goes) wrong|only rank 0|all (three )?ranks (are|go) wrong"
        r"|all ranks and all rows",
        r"(?i)(out|weights)\.(weight|bias) (is|are) wrong|detach|no gradient",
        r"(?i)(other|wrong) (rows|labels|images)",
    ],
)
WHY = (
    "The forward is right on all ranks. In Sample's backward the gradient for x is multiplied by the height and that for y by the width of the map; the gradient for the map's values is right. For square maps (rows 0-2 of rank 0, "
    "row 5 of rank 1, row 9 of rank 2) nothing is wrong; wrong are rows 3 (4 x 8) and 4 (5 x 7) of rank 1 (its first micro-batch), row 6 (8 x 3) of rank 2's first and rows 7 (7 x 4), 8 (6 x 8) of its second micro-batch: x by the "
    "factor height / width, y by width / height. Parameters: reference, offsets (weight and bias), and through the query of the offsets query and backbone; weights and out are right. DDP's average, no_sync, the scale 3 / 10 are "
    "right. Fix: width for x, height for y."
)
