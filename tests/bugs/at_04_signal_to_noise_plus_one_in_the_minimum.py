"""Diffusion model with velocity prediction over three pipeline stages (torch.distributed.pipelining, GPipe schedule, four micro-batches of two rows): each stage is a residual block, the last one computes the loss of its micro-batch. Every
row has a min-SNR weight, min(SNR, gamma) / (SNR + 1) for the velocity target. The divisor is the number of rows.

The bug: one is added to the signal-to-noise ratio before the minimum is taken, so that the weight is min(SNR + 1, gamma) / (SNR + 1): the noisy rows get weight one instead of almost none. As in huggingface/diffusers issue 5654 (fix PR
6307 and PR 8466) and TiankaiHang/Min-SNR-Diffusion-Training issue 5.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
ROWS, SIZE, WIDTH, MICRO, GAMMA = 8, 6, 9, 4, 5.0


class Stage(nn.Module):
    def __init__(self, first, last):
        super().__init__()
        self.inner = nn.Linear(SIZE + 2, WIDTH) if first else None
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.outer = nn.Linear(WIDTH, SIZE) if last else None

    def forward(self, x):
        if self.inner is not None:
            x = self.inner(x)
        x = x + self.down(F.silu(self.up(self.norm(x))))
        return x if self.outer is None else self.outer(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([Stage(True, False), Stage(False, False), Stage(False, True)])

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def noised(rows):
    """The input (noisy sample and two features of the time) and the target with its SNR."""
    angle = rows["time"][:, None] * math.pi / 2
    alpha, sigma = torch.cos(angle), torch.sin(angle)
    noisy = alpha * rows["sample"] + sigma * rows["noise"]
    velocity = alpha * rows["noise"] - sigma * rows["sample"]
    return torch.cat([noisy, alpha, sigma], 1), torch.cat([velocity, (alpha / sigma) ** 2], 1)


def velocity_loss(out, target, early):
    velocity, snr = target[:, :-1], target[:, -1]
    if early:
        weight = (snr + 1).clamp(max=GAMMA) / (snr + 1)
    else:
        weight = snr.clamp(max=GAMMA) / (snr + 1)
    return ((out - velocity).square().mean(1) * weight).sum()


class Clean:
    early = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "sample": torch.randn(ROWS, SIZE, generator=g),
            "noise": torch.randn(ROWS, SIZE, generator=g),
            "time": torch.tensor([0.9, 0.2, 0.55, 0.7, 0.1, 0.97, 0.4, 0.8]),
        }

    def loss_sum(self, model, rows):
        x, target = noised(rows)
        return velocity_loss(model(x), target, False), len(x)

    def step(self, model, batch, ctx):
        group = ctx.group("pp")
        rank = dist.get_rank(group)
        x, target = noised(batch)
        device = next(model.parameters()).device
        stage = PipelineStage(model.stages[rank], rank, len(model.stages), device, group=group)
        schedule = ScheduleGPipe(
            stage,
            MICRO,
            loss_fn=lambda out, goal: velocity_loss(out, goal, self.early) / ROWS,
            scale_grads=False,
        )
        if rank == 0:
            schedule.step(x)
        elif rank == len(model.stages) - 1:
            schedule.step(target=target)
        else:
            schedule.step()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    early = True


EXPECT = dict(
    right=[
        r"(?i)loss|weights?\b",
        r"(?i)weight(s|ed|ing)?\b|coefficient|loss (itself|function|value)"
        r"|rows? .{0,60}(scaled|times|factor|counts?)"
        r"|SNR|unequal(ly)?|not (equally|alike)|differently",
    ],
    place=[r"(?i)loss|rows?|stages\.2|last stage|rank 2|micro.?batch"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)forward (is wrong|goes wrong) (in|at|on)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|all rows .{0,30}(same|one) factor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|swapped|exchanged)",
        r"(?i)gradient .{0,30}(lost|swapped|wrong) .{0,20}(transport|between stages|boundary)",
        r"(?i)(target|label|input)s? .{0,15}(is|are) (wrong|of (an)?other)",
    ],
)
WHY = (
    "The model, its input, its output and the target velocity are right on all stages; the weight of every row in the loss of the last stage (rank 2) is wrong unless SNR >= gamma: min(SNR + 1, 5) / "
    "(SNR + 1) instead of min(SNR, 5) / (SNR + 1). "
    "SNR is cot^2(pi t / 2). Rows 0, 2, 3, 5, 6, 7 (times 0.9, 0.55, 0.7, 0.97, 0.4, 0.8) get weight 1 instead of SNR / (SNR + 1) = cos^2(pi t / 2) = 0.024, 0.422, 0.206, 0.0022, 0.655, 0.095; rows 1 "
    "(t = 0.2) and 4 (t = 0.1) have SNR above 5 and are right. "
    "So each of these rows counts by its own factor (1 / weight) too much, in all four micro-batches except row 1's and row 4's part. The whole gradient is wrong in direction for all stages. The "
    "transport between the stages, the divisor 8, scale_grads=False and the "
    "sum over pp are right. Fix: add one in the denominator only."
)
