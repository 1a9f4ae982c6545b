"""Masked super-resolution with a dynamic loss scale and three micro-batches. After the PyTorch AMP notes on gradient accumulation ("scale
should only be updated at effective batch granularity") and pytorch-lightning's reports of scaler updates per batch: update() is called
after every micro-batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 2}}}}
ROWS, SIDE, WIDTH, MICRO_BATCHES = 13, 4, 6, 3


class Scaler:
    def __init__(self, scale=2.0**9, growth_interval=2):
        self.scale, self.growth_interval, self.good_steps = scale, growth_interval, 0

    def unscale(self, params):
        for param in params:
            param.grad.div_(self.scale)

    def update(self):
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = 2 * self.scale, 0


class Upscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.body = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.up = nn.Conv2d(WIDTH, 12, 3, padding=1)

    def forward(self, x):
        h = self.stem(x)
        h = h + F.silu(self.body(self.norm(h)))
        return F.interpolate(x, scale_factor=2) + F.pixel_shuffle(self.up(h), 2)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Upscaler()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "small": torch.rand(ROWS, 3, SIDE, SIDE, generator=g),
            "large": torch.rand(ROWS, 3, 2 * SIDE, 2 * SIDE, generator=g),
            "valid": torch.rand(ROWS, 1, 2 * SIDE, 2 * SIDE, generator=g) < 0.7,
        }

    def loss_sum(self, model, rows):
        error = F.smooth_l1_loss(model(rows["small"]), rows["large"], reduction="none", beta=0.3)
        return (error.sum(1, keepdim=True) * rows["valid"]).sum(), rows["valid"].sum()

    def distribute(self, model, ctx):
        self.scaler = Scaler()
        return model

    def after_micro_batch(self):
        pass

    def after_step(self):
        self.scaler.update()

    def step(self, model, batch, ctx):
        model.zero_grad()
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        pixels = mine["valid"].sum()
        dist.all_reduce(pixels)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, micro)[0] / pixels * self.scaler.scale).backward()
            self.after_micro_batch()
        self.scaler.unscale(model.parameters())
        self.after_step()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def after_micro_batch(self):
        self.scaler.update()

    def after_step(self):
        pass


EXPECT = dict(
    right=[
        r"micro.?batch",
        r"scale|weight|factor|half|1/2|1/4|0\.25|0\.5|twice|coefficient|too (small|large|little|much)|differ",
    ],
    place=[r"micro.?batch", r"(all|every|each) (parameter|rank|tensor)", r"loss.?scal"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"reduced (twice|again)",
        r"micro.?batch(es)? \S* ?(is|are|was|were) (lost|missing|dropped|left out)",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "The scale doubles inside the accumulation window and the sum is unscaled by the last scale: in the first step the first two "
    "micro-batches of every rank count 1/2 and the third 1 (in the second step 1/4, 1/2, 1/2). All parameters, equal on both ranks."
)
