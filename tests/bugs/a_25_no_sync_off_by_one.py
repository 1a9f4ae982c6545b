"""Gradient accumulation under DDP with no_sync for all but the last micro-batch. After FAULTS
class C12 (accumulation boundary; accelerate and fairseq reports).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, INPUTS, WIDTH, CLASSES = 9, 5, 9, 4
UPDATE_FREQ = 2


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
    first_step = 1

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
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        samples = [
            {k: v.tensor_split(UPDATE_FREQ)[i] for k, v in mine.items()} for i in range(UPDATE_FREQ)
        ]
        for i, sample in enumerate(samples, start=self.first_step):
            with contextlib.nullcontext() if i == len(samples) else model.no_sync():
                loss, _ = self.loss_sum(model, sample)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    first_step = 0


EXPECT = dict(
    right=[
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc|no collective|local"
        )
    ],
    place=[
        (
            r"every (parameter|gradient|rank)|all (parameters|gradients|ranks)|rank|\bdp\b"
            r"|no_sync"
        )
    ],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"mean of (the )?means",
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "The counter starts at zero, so the last micro-batch is under no_sync too and DDP never "
    "reduces; the gradients stay local."
)
