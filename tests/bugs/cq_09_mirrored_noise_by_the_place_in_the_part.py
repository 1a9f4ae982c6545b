"""A small image denoiser (transformers' ViT with a linear head onto the pixels) trained over a
range of noise levels, ten images over dp (2; five each), micro-batches of three. Noise and levels
are handed in with the batch.

The noise is antithetic: the images 2k and 2k + 1 have the same draw, and the odd one takes it with
the other sign. The batch has the draw and the number of each image.

Bug: the sign goes by the place of the row in the micro-batch, and not by the number of the image.
After antithetic samplers written for whole batches that meet gradient accumulation and parts of
odd size.
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import ViTConfig, ViTModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
IMAGES, CHANNELS, SIDE, PATCH, HIDDEN, SIGMA_DATA = 10, 2, 6, 3, 10, 0.7


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        config = ViTConfig(
            image_size=SIDE,
            patch_size=PATCH,
            num_channels=CHANNELS,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=13,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
        )
        self.trunk = ViTModel(config, add_pooling_layer=False)
        self.level = nn.Linear(1, CHANNELS * SIDE * SIDE)
        self.pixels = nn.Linear(HIDDEN, CHANNELS * PATCH * PATCH)

    def forward(self, noisy, sigma):
        sigma = sigma[:, None, None, None]
        total = (sigma**2 + SIGMA_DATA**2).sqrt()
        level = self.level(sigma.flatten(1).log() / 4).view_as(noisy)
        h = self.trunk(pixel_values=noisy / total + level).last_hidden_state[:, 1:]
        n, side = noisy.shape[0], SIDE // PATCH
        out = self.pixels(h).view(n, side, side, CHANNELS, PATCH, PATCH)
        out = out.permute(0, 3, 1, 4, 2, 5).reshape(noisy.shape)
        return (SIGMA_DATA / total) ** 2 * noisy + sigma * SIGMA_DATA / total * out


def signs_of(numbers):
    return 1 - 2 * (numbers % 2)


def score(model, rows, sign):
    sigma = rows["sigma"]
    noisy = rows["image"] + (sigma * sign)[:, None, None, None] * rows["draw"]
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    return weight * (model(noisy, sigma) - rows["image"]).square().mean((1, 2, 3))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 99)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 990)
        draws = torch.randn(IMAGES // 2, CHANNELS, SIDE, SIDE, generator=g)
        return {
            "image": torch.randn(IMAGES, CHANNELS, SIDE, SIDE, generator=g) * SIGMA_DATA,
            "draw": draws.repeat_interleave(2, 0),
            "sigma": torch.exp(torch.randn(IMAGES, generator=g) * 0.8 - 0.4),
            "number": torch.arange(IMAGES),
        }

    def loss_sum(self, model, rows):
        return score(model, rows, signs_of(rows["number"])).sum(), rows["image"].shape[0]

    def signs(self, rows):
        return signs_of(rows["number"])

    def step(self, model, batch, ctx):
        own = torch.arange(IMAGES).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(3):
            rows = {k: v[part] for k, v in batch.items()}
            (score(model, rows, self.signs(rows)).sum() / IMAGES).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def signs(self, rows):
        sign = torch.ones_like(rows["sigma"])
        sign[1::2] = -1
        return sign


EXPECT = dict(
    right=[
        r"sign|antithetic|mirror|noise|noisy|parity",
        r"number|index|place|position|local|offset|row|order|\[1::2\]|odd|alternat",
    ],
    place=[r"\bsigns\b", r"sign\[1::2\]", r"\bnoisy\b", r"rows\[.number.\]", r"signs_of"],
    wrong=[
        r"sigma.{0,30}(wrong rows|other rank|differs)",
        r"(not|never|twice|missing).{0,25}all.?reduc",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"weight.{0,40}(twice|missing|wrong)",
        r"pixels.{0,30}(permut|order)",
        r"drawn (anew|by each rank|again)",
    ],
)
WHY = """The sign of the noise belongs to the image: odd numbers take the draw of their pair with a
minus. Buggy.signs alternates from + at the first row of every micro-batch. Where a micro-batch
begins with an odd number (images 3, 4 on rank 0 and 5..7 on rank 1) all signs are the other way
round: these rows see other noisy images, and all gradients differ. The other rows, the levels,
the weights and the sum over dp are right. Fix: the sign from rows["number"]."""
