"""Batch norm with statistics over all ranks, switched on by a conversion of the model. After
FAULTS class C18 (SyncBatchNorm conversion that misses nested modules).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES = 10, 6, 8, 4


class SumOverRanks(torch.autograd.Function):
    """Statistics of all ranks; each rank's loss depends on every rank's rows."""

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


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.rand(width) + 0.5),
            nn.Parameter(torch.randn(width)),
        )
        self.group = None

    def forward(self, x):
        count = torch.full_like(x[0, :1].detach(), len(x))
        statistics = torch.cat([x.sum(0), x.square().sum(0), count])
        if self.group is not None:
            statistics = SumOverRanks.apply(statistics, self.group)
        mean, square = (statistics[:-1] / statistics[-1].detach()).chunk(2)
        return (x - mean) * (square - mean.square() + 1e-3).rsqrt() * self.weight + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.bn = nn.Linear(WIDTH, WIDTH), BatchNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.bn(self.linear(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Linear(INPUTS, WIDTH), BatchNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.bn(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        for module in self.to_convert(model):
            if isinstance(module, BatchNorm):
                module.group = ctx.group("dp")
        return model

    def to_convert(self, model):
        return model.modules()

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def to_convert(self, model):
        return model.children()


EXPECT = dict(
    right=[
        r"statistic|forward|output|couple|batch.?norm|own rows|local",
        r"blocks\.0\.bn|blocks\.\d",
    ],
    place=[r"blocks\.0|bn"],
    wrong=[
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "Only top-level children are converted, so blocks.0.bn and blocks.1.bn use the statistics "
    "of their own rank's rows."
)
