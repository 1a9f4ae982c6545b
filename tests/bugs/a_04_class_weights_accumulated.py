"""A classifier with class weights, three accumulated micro-batches under DDP. After FAULTS
C01-11 (pytorch issue 72047).
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, INPUTS, WIDTH, CLASSES = 12, 7, 10, 4
ACCUMULATE = 3
CLASS_WEIGHTS = (0.2, 1.0, 3.0, 5.0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
        logits = model(rows["x"])
        weight = torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype)
        loss = F.cross_entropy(logits, rows["y"], weight=weight, reduction="sum")
        return loss, weight[rows["y"]].sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        micros = [
            {k: v.tensor_split(ACCUMULATE)[i] for k, v in mine.items()} for i in range(ACCUMULATE)
        ]
        for i, micro in enumerate(micros):
            with contextlib.nullcontext() if i == ACCUMULATE - 1 else model.no_sync():
                self.loss(model, micro, mine, ctx).backward()

    def loss(self, model, micro, mine, ctx):
        loss, _ = self.loss_sum(model, micro)
        weights = torch.tensor(CLASS_WEIGHTS, dtype=loss.dtype)[mine["y"]].sum()
        dist.all_reduce(weights)
        return loss * ctx.world_size / weights


class Buggy(Clean):
    def loss(self, model, micro, mine, ctx):
        logits = model(micro["x"])
        criterion = nn.CrossEntropyLoss(weight=torch.tensor(CLASS_WEIGHTS, dtype=logits.dtype))
        return criterion(logits, micro["y"]) / ACCUMULATE


EXPECT = dict(
    right=[
        (
            r"mean of (the )?means|(own|local) (count|denominator|number|divisor|mean|weight)"
            r"|micro.?batch.{0,60}count|(count|number).{0,20} of (its|each|their"
            r"|the) (own )?(micro|rank|chunk|part|shard|stretch)|averag.{0,60}(micro|rank"
            r"|chunk|part|shard|means)|means.{0,60}averag|(its|their) own (valid "
            r"|loss.?mask )?(tokens|rows|sum|number|weights|positions)|sum of weights|(its"
            r"|their|the) own weights"
        )
    ],
    place=[r"micro", r"rank", r"count|weight"],
    wrong=[
        r"gradient.{0,30}(not|never) reduced",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "The weighted mean of every micro-batch divides by the weights of its own rows; the means "
    "are then averaged."
)
