"""A small denoiser of images with Euler noise levels, sharded with fully_shard (each block and the rest) on three ranks, two micro-batches of uneven size each. All images of a micro-batch have one noise level. The sampler's scale_input, which
divides the noisy images by sqrt(sigma^2 + 1), is used in training as well. Divisor: number of images of all ranks.

The bug: scale_input looks its index up in its first call only, as in sampling, where step() moves it on, and nobody puts it back between the micro-batches: all images are scaled by the level of the first call. After huggingface/diffusers PR
4347 (add a step_index counter), which gave the schedulers such a state.
"""

import math

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIGMAS = [5.0, 2.5, 1.4, 0.7, 0.3]
TIMES = [999, 749, 499, 249, 0]
PARTS = [[(0, 3), (3, 5)], [(5, 6), (6, 10)], [(10, 12), (12, 15)]]
LEVELS = [[1, 4], [3, 0], [2, 2]]
CHANNELS, SIZE = 3, 5


class EulerLevels:
    def __init__(self):
        self.times, self.index = TIMES, None

    def find(self, time):
        return self.times.index(int(time))

    def restart(self):
        self.index = None

    def add_noise(self, clean, noise, time):
        return clean + SIGMAS[self.find(time)] * noise

    def scale_input(self, noisy, time):
        if self.index is None:
            self.index = self.find(time)
        return noisy / math.sqrt(SIGMAS[self.index] ** 2 + 1)

    def step(self, noisy, noise):
        move = SIGMAS[self.index + 1] - SIGMAS[self.index]
        self.index += 1
        return noisy + move * noise


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(2, width)
        self.mix = nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(4, width)

    def forward(self, x, time):
        return x + self.mix(F.silu(self.norm(x) + self.time(time)[:, :, None, None]))


class Denoiser(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.enter = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.leave = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, x, time):
        angle = time[:, None].to(x.dtype) / 1000 * torch.tensor([1.0, 5.0], dtype=x.dtype)
        time = torch.cat([angle.sin(), angle.cos()], 1)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, time)
        return self.leave(x)


class Clean:
    anew = True

    def __init__(self, seed=0):
        self.seed = seed
        self.levels = EulerLevels()

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        time = torch.zeros(rows, dtype=torch.long)
        for parts, levels in zip(PARTS, LEVELS):
            for (low, high), level in zip(parts, levels):
                time[low:high] = TIMES[level]
        return {
            "image": torch.randn(rows, CHANNELS, SIZE, SIZE, generator=g),
            "noise": torch.randn(rows, CHANNELS, SIZE, SIZE, generator=g),
            "time": time,
        }

    def loss_sum(self, model, rows):
        sigma = torch.tensor([SIGMAS[TIMES.index(int(t))] for t in rows["time"]])
        sigma = sigma.to(rows["image"].dtype)[:, None, None, None]
        noisy = rows["image"] + sigma * rows["noise"]
        guess = model(noisy / (sigma**2 + 1).sqrt(), rows["time"])
        return F.mse_loss(guess, rows["noise"], reduction="sum"), len(guess)

    def distribute(self, model, ctx):
        for block in model.blocks:
            fully_shard(block, mesh=ctx.mesh["dp"])
        return fully_shard(model, mesh=ctx.mesh["dp"])

    def step(self, model, batch, ctx):
        levels = self.levels
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            if self.anew:
                levels.restart()
            time = rows["time"][0]
            noisy = levels.add_noise(rows["image"], rows["noise"], time)
            guess = model(levels.scale_input(noisy, time), rows["time"])
            loss = F.mse_loss(guess, rows["noise"], reduction="sum")
            (loss * ctx.world_size / len(batch["time"])).backward()


class Buggy(Clean):
    anew = False


EXPECT = dict(
    right=[
        r"(?i)scale_input|enter|input|sigma|level|index|noisy|handed|bb_04\w*\.py:\d+",
        r"(?i)micro.?batch(es)? (1|2|[^.]{0,20}(second|later|last))|second micro|after the first|first call|call 1|"
        r"call 2|second call|later|left (over|behind)|stays|state|previous|rank 0(-1| and 1|, 1)|ranks? 0",
        r"(?i)forward|what goes into|input|divi|scale|argument|factor|times|handed",
    ],
    place=[r"(?i)scale_input|enter|EulerLevels|SIGMAS|index|sqrt|bb_04\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|too (early|late)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (count|rows)|wrong (loss )?divisor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)first micro.?batch.{0,25}(goes|is) wrong|all micro.?batch.{0,20}wrong|rank 2.{0,25}(goes|is) wrong",
        r"(?i)noise .{0,20}(drawn|seed)|random numbers|labels? .{0,20}(is|are) wrong",
        r"(?i)(blocks?\.[01]|norm|mix|GroupNorm)( itself)? (is|goes) wrong|sharded parameter .{0,20}stale",
    ],
)
WHY = (
    "EulerLevels.scale_input keeps the index of its first call (self.index), and the step does not restart it between micro-batches. Each rank's first micro-batch is right. Rank 0 micro-batch 1 (rows 3, 4) is divided by sqrt(2.5^2 + 1) instead "
    "of sqrt(0.3^2 + 1), rank 1 micro-batch 1 (rows 6-9) by sqrt(0.7^2 + 1) instead of sqrt(5^2 + 1). Rank 2 has the same level in both micro-batches and is right. add_noise looks up each time and is right; the time handed to the model "
    "is right too. What goes into the model (into `enter`) is a multiple of the right input, hence all gradients are wrong. FSDP2, divisor 15, reduction are right. Fix: restart the index in front of each micro-batch, or look it up each time."
)
