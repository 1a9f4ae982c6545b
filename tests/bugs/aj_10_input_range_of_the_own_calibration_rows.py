"""Regression with a clipped input (the first half of an 8-bit input quantiser) under DDP on four ranks, two micro-batches each. The range of every feature is a buffer, set once before training from ten calibration rows that are dealt
out over the ranks; DDP runs with broadcast_buffers=False, as the ranges are meant to be equal already.

The bug: every rank keeps the maximum over its own calibration rows, the all-reduce with MAX is missing. So the ranks clip at different values. As asked in pytorch/pytorch issue 85627 (will the observer be synchronized across GPUs in
DDP?) and added in vllm-project/llm-compressor PR 2391 (observer minima and maxima all-reduced over the ranks).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
FEATURES, WIDTH, TARGETS = 4, 6, 2
SHARES = [(0, 3), (3, 6), (6, 8), (8, 10)]
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 10)], [(10, 11), (11, 13)]]


def calibration():
    g = torch.Generator().manual_seed(77)
    return torch.randn(SHARES[-1][1], FEATURES, generator=g, dtype=torch.float32)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("limit", calibration().abs().amax(0))

    def calibrate(self, rows, group):
        limit = rows.abs().amax(0)
        if group is not None:
            dist.all_reduce(limit, op=dist.ReduceOp.MAX, group=group)
        self.limit.copy_(limit)

    def forward(self, x):
        return torch.maximum(torch.minimum(x, self.limit), -self.limit)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.clip = Clip()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, TARGETS)

    def forward(self, x):
        h = torch.tanh(self.first(self.clip(x)))
        return self.last(h + torch.tanh(self.second(h)))


class Clean:
    own_range = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "x": 1.5 * torch.randn(rows, FEATURES, generator=g),
            "y": torch.randn(rows, TARGETS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        model = DistributedDataParallel(
            model, process_group=ctx.group("dp"), broadcast_buffers=False
        )
        low, high = SHARES[ctx.rank]
        group = None if self.own_range else ctx.group("dp")
        model.module.clip.calibrate(calibration()[low:high], group)
        return model

    def step(self, model, batch, ctx):
        total, parts = len(batch["x"]), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (self.loss_sum(model, rows)[0] * ctx.world_size / total).backward()


class Buggy(Clean):
    own_range = True


EXPECT = dict(
    right=[
        r"(?i)clip|limit|buffer|range",
        r"(?i)forward|output|buffer|differ|own|local|other|unequal|not (the )?(same|equal)|sync|weights|calibrat",
    ],
    place=[r"(?i)clip|limit|buffer"],
    wrong=[
        r"(?i)forward is right|only (in )?the backward is wrong",
        r"(?i)gradients? .{0,20}not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)gradient clip|clip(ping|s)? (of )?(the )?(gradient|norm)|max_norm",
        r"(?i)(first|second|last)\.(weight|bias) (is|are|differs?) .{0,20}(not equal|different) (on|between|across)",
        r"(?i)input rows (of|are) (other|wrong)|reads? (the )?(other|wrong) rows",
    ],
)
WHY = (
    "The buffer clip.limit should be the maximum of |x| over all ten calibration rows; each rank has the maximum over its own two or three rows, which is smaller in every feature except where the rank holds the largest row itself. So "
    "the forward goes wrong at `clip`, the first module, on the ranks and rows where a value lies beyond the rank's own limit (values below it pass unchanged). No rank holds the largest row for all features, so in general all four "
    "ranks clip too early for some rows. The wrong inputs give wrong gradients for first, second and last; after DDP's average the gradients are wrong and equal on all ranks. Parameters, rows, targets, divisor 13, no_sync and the "
    "reduction of the gradients are right. DDP does not broadcast buffers here (and with rank 0's range it would still be wrong). Fix: all_reduce(limit, MAX) in calibrate."
)
