"""The discriminator of a StyleGAN with the minibatch standard deviation layer: the rows of a batch form groups of GROUP rows, and each row is given a channel with the standard deviation over its group. As in the published
code a group is strided: x.reshape(GROUP, N // GROUP, ...), row i goes with row i + N/GROUP. Twelve rows (six groups of two), two DDP ranks, two accumulated micro-batches of two groups and of one.

The bug: the loader hands each rank a contiguous range of rows, and the layer forms its groups of those. The groups are of the right size, but of other rows than in the full batch. After the reports on stylegan2-ada-pytorch
about the minibatch layer, whose result depends on batch-gpu and the order of rows.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, GROUP, CHANNELS, SIDE = 12, 2, 5, 4
ACCUMULATION = 2


class MinibatchStd(nn.Module):
    def forward(self, x):
        n, c, h, w = x.shape
        group = GROUP if n % GROUP == 0 else 1
        y = x.reshape(group, n // group, c, h, w)
        y = y - y.mean(0)
        y = (y.square().mean(0) + 1e-8).sqrt().mean((1, 2, 3))
        y = y.reshape(-1, 1, 1, 1).repeat(group, 1, h, w)
        return torch.cat([x, y], 1)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.from_rgb = nn.Conv2d(3, CHANNELS, 1)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.std = MinibatchStd()
        self.last = nn.Conv2d(CHANNELS + 1, CHANNELS, 3, padding=1)
        self.out = nn.Linear(CHANNELS * SIDE * SIDE, 1)

    def forward(self, images):
        x = F.leaky_relu(self.from_rgb(images), 0.2)
        x = F.leaky_relu(self.conv(x), 0.2)
        x = F.leaky_relu(self.last(2 * self.std(x)), 0.2)
        return self.out(x.flatten(1)).squeeze(1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Discriminator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        images = torch.randn(ROWS, 3, SIDE, SIDE, generator=g)
        scale = torch.rand(ROWS, 1, 1, 1, generator=g) * 2 + 0.3
        return {"images": images * scale, "real": (torch.rand(ROWS, generator=g) < 0.5).float()}

    def loss_sum(self, model, rows):
        score = model(rows["images"])
        sign = 1 - 2 * rows["real"]
        return F.softplus(sign * score).sum(), len(score)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def own_rows(self, ctx):
        groups = torch.arange(ROWS).reshape(GROUP, -1)
        return groups.tensor_split(ctx.axes["dp"], dim=1)[ctx.coords["dp"]]

    def micro_batches(self, batch, ctx):
        for rows in self.own_rows(ctx).tensor_split(ACCUMULATION, dim=1):
            yield {k: v[rows.reshape(-1)] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        for n, part in enumerate(self.micro_batches(batch, ctx)):
            last = n == ACCUMULATION - 1
            with contextlib.nullcontext() if last else model.no_sync():
                score = model(part["images"])
                sign = 1 - 2 * part["real"]
                (F.softplus(sign * score).sum() * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def micro_batches(self, batch, ctx):
        own = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for n in range(ACCUMULATION):
            yield {k: v.split(4)[n] for k, v in own.items()}


EXPECT = dict(
    right=[
        r"rows|group(s|ed|ing)?|batch.{0,20}(split|statistic|coupled)|micro.?batch",
        r"contiguous|strided|other rows|different rows|group(s|ed|ing)|which rows|std|standard deviation|statistic|(depend|coupled).{0,40}(rows|batch)|(order|assignment|split|dealt|choice) of (the )?rows|mix(es|ed)? rows",
    ],
    place=[r"micro_batches", r"own_rows", r"MinibatchStd|\bstd\b|minibatch", r"tensor_split|rows"],
    wrong=[
        r"not reduced|reduced twice|never reduced|missing (all.?)?reduc|wrong group of ranks|no_sync",
        r"rows? .{0,30}(twice|dropped|lost|skipped|missing)",
        r"divisor|mean of means|world.?size|factor of",
    ],
)
WHY = (
    "In the full batch of twelve rows group j is rows j and j+6. Each rank takes a contiguous half of the rows and cuts it into micro-batches of four and two neighbouring rows, "
    "whose groups are rows i and i+2 or two neighbours: every row counts once and with the right weight, but its standard deviation is that over other rows. The forward value of the std channel is wrong on both ranks in every micro-batch, and with it all gradients. "
    "A right cause says that rows that belong together (groups) are not computed together: the layer's statistic is taken over other rows because rows are dealt out contiguously. Fix: deal out whole strided groups, as own_rows does."
)
