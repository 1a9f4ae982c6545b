"""An implicit image model (sine layers over pixel coordinates, modulated by a latent of the image)
on sampled pixels of images that are 5 high and 7 wide. FSDP2 (fully_shard) over two ranks with 3
and 2 of 5 images, two micro-batches each. The pixels of a row come as flat numbers; the ranks turn
them into coordinates.

Bug: the flat number is taken apart with the height (number // height, number % height) where the
rows of the image are as long as it is wide. The colours are read by the flat number and are right.
After coordinate samplers written for square images.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, HIGH, WIDE, SAMPLED, LATENT, HIDDEN = 5, 5, 7, 9, 3, 8


class Sine(nn.Module):
    def __init__(self, n, m, rate):
        super().__init__()
        self.linear, self.rate = nn.Linear(n, m), rate
        self.scale = nn.Linear(LATENT, m)

    def forward(self, x, latent):
        return torch.sin(self.rate * self.linear(x) * (1 + self.scale(latent)[:, None]))


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Sine(2, HIDDEN, 3.0), Sine(HIDDEN, HIDDEN, 1.5)])
        self.colour = nn.Linear(HIDDEN, 3)

    def forward(self, places, latent):
        x = places
        for layer in self.layers:
            x = layer(x, latent)
        return self.colour(x)


def to_unit(row, column, dtype):
    return torch.stack(
        [2.0 * row.to(dtype) / (HIGH - 1) - 1.0, 2.0 * column.to(dtype) / (WIDE - 1) - 1.0], -1
    )


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 710)
        return {
            "image": torch.rand(IMAGES, 3, HIGH, WIDE, generator=g),
            "latent": torch.randn(IMAGES, LATENT, generator=g),
            "pixel": torch.rand(IMAGES, HIGH * WIDE, generator=g).argsort(-1)[:, :SAMPLED],
        }

    def squares(self, model, rows, places):
        colours = rows["image"].flatten(2).transpose(1, 2)
        wanted = colours.gather(1, rows["pixel"][..., None].expand(-1, -1, 3))
        return (model(places, rows["latent"]) - wanted).square().sum()

    def loss_sum(self, model, rows):
        y = torch.div(rows["pixel"], WIDE, rounding_mode="floor")
        places = to_unit(y, rows["pixel"] - y * WIDE, rows["image"].dtype)
        return self.squares(model, rows, places), rows["pixel"].numel() * 3

    def places(self, image, pixel):
        width = image.shape[-1]
        return to_unit(pixel // width, pixel % width, image.dtype)

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (ctx.axes["dp"],))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, model, batch, ctx):
        ranks = ctx.axes["dp"]
        own = torch.arange(IMAGES).tensor_split(ranks)[ctx.coords["dp"]]
        # Two turns on both ranks: fully_shard communicates in each.
        for rows in own.tensor_split(2):
            part = {k: v[rows] for k, v in batch.items()}
            loss = self.squares(model, part, self.places(part["image"], part["pixel"]))
            (loss * ranks / (batch["pixel"].numel() * 3)).backward()


class Buggy(Clean):
    def places(self, image, pixel):
        height = image.shape[-2]
        return to_unit(pixel // height, pixel % height, image.dtype)


EXPECT = dict(
    right=[
        r"height|width|stride|row length|shape\[-[12]\]|\b(wide|high)\b|square|HIGH|WIDE",
        r"coordinate|place|pixel|position|grid|index|row|column",
        r"//|%|divid|modul|unravel|divmod|instead of|stride|height|taken apart|decod|wrong",
    ],
    place=[r"\bplaces\b", r"pixel // height", r"pixel % height", r"to_unit"],
    wrong=[
        r"(missing|not|never|twice).{0,20}(all.?reduc|reduce.?scatter)",
        r"(ranks|divide factor|averag).{0,30}(wrong|twice|missing)",
        r"uneven.{0,40}(images|rows)",
        r"gather.{0,30}(wrong|colou?r)",
        r"rate.{0,20}(wrong|missing)",
    ],
)
WHY = """Pixels are numbered row by row: row = number // width, column = number % width.
Buggy.places divides by the height (5 instead of 7): the field is asked at other places than those
whose colours are the targets (rows even beyond the image). Loss and all gradients are wrong;
sharding, scaling and reduction are right. A right cause says that coordinates are computed with the
height in place of the width. Fix: use image.shape[-1]."""
