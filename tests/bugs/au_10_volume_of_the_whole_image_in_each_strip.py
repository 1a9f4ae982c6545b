"""Normalising flow (Glow: actnorm, invertible 1 x 1 convolution, affine coupling) on images of eight rows that are cut into three strips (3, 1 and 4 rows) on three ranks, two micro-batches. All operations are pointwise, so a strip
needs nothing of the others; the negative log-likelihood is the sum over the strips. The divisor is the number of images times the values of an image.

The bug: the log-determinants of actnorm and convolution are multiplied by the number of pixels of the image as configured, in every strip, and not by the pixels at hand. The sum over the strips has them three times. The factor of
the log-determinant of the 1 x 1 convolution is the subject of jaywalnut310/glow-tts issue 17 (full width instead of what is there).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
IMAGES, CHANNELS, HEIGHT, WIDE, STEPS = 5, 4, 8, 3, 2
STRIPS = [(0, 3), (3, 4), (4, 8)]
PARTS = [(0, 2), (2, 5)]


class FlowStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(CHANNELS) * 0.3)
        self.logs = nn.Parameter(torch.randn(CHANNELS) * 0.2)
        mix = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS))[0]
        self.mix = nn.Parameter(mix + 0.1 * torch.randn(CHANNELS, CHANNELS))
        self.coupling = nn.Sequential(
            nn.Conv2d(CHANNELS // 2, 6, 1), nn.Tanh(), nn.Conv2d(6, CHANNELS, 1)
        )

    def forward(self, x, pixels):
        x = (x + self.shift[:, None, None]) * self.logs.exp()[:, None, None]
        x = torch.einsum("oc,nchw->nohw", self.mix, x)
        volume = pixels * (self.logs.sum() + torch.linalg.slogdet(self.mix)[1])
        a, b = x.chunk(2, 1)
        scale, move = self.coupling(a).chunk(2, 1)
        scale = torch.tanh(scale)
        x = torch.cat([a, b * scale.exp() + move], 1)
        return x, volume + scale.sum((1, 2, 3))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(FlowStep() for _ in range(STEPS))

    def forward(self, x, pixels):
        total = 0
        for step in self.steps:
            x, volume = step(x, pixels)
            total = total + volume
        return (0.5 * x.square().sum((1, 2, 3)) - total).sum()


class Clean:
    configured = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Flow()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"image": torch.randn(IMAGES, CHANNELS, HEIGHT, WIDE, generator=g)}

    def loss_sum(self, model, rows):
        return model(rows["image"], HEIGHT * WIDE), rows["image"].numel()

    def step(self, model, batch, ctx):
        group = ctx.group("sp")
        top, bottom = STRIPS[ctx.rank]
        for low, high in PARTS:
            strip = batch["image"][low:high, :, top:bottom]
            pixels = HEIGHT * WIDE if self.configured else strip[0, 0].numel()
            (model(strip, pixels) / batch["image"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    configured = True


EXPECT = dict(
    right=[
        r"(?i)logs|mix|log.?det|volume|determinant|loss|term",
        r"(?i)(3|three) times|three|factor|too (large|much|often)|counted|repeat|replicat|every rank|each (rank|strip)|wrong|other|different|differ|deviat|weight|scale",
        r"(?i)logs|mix|log.?det|volume|determinant|loss|pixels",
    ],
    place=[r"(?i)logs|mix|log.?det|volume|determinant|loss"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|gradients? .{0,20}(reduced|summed) (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own",
        r"(?i)(coupling|shift)[^.]{0,30}(is|are|has|goes) (a )?wrong",
        r"(?i)backward of .{0,40} is wrong|goes wrong in the backward",
        r"(?i)(image|rows|strips?|halo|input) (is|are) (wrong|other|of|missing)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (on )?rank [012]\b|all parameters",
    ],
)
WHY = (
    "The term pixels * (sum of logs + log|det mix|) of both flow steps is taken with all 24 pixels of the image on each of the three ranks instead of 9, 3 and 12 pixels of the strips; the sum over the ranks has it three times. So "
    "the loss is wrong on all ranks, in both micro-batches and for all images; the gradients of steps.0.logs, steps.1.logs, steps.0.mix and steps.1.mix have the part of the log-determinant three times (the part through z is "
    "right), and so they are wrong in direction, equally on all ranks. shift and coupling (their own log-determinant is a sum over the strip) are right; x is right at every layer. Divisor 480, accumulation and the all-reduce are "
    "right. Fix: the pixels of the strip."
)
