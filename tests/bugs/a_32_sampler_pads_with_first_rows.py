"""FSDP1 with a distributed sampler over rows that do not divide by the ranks. After FAULTS
C03-08 and torch's DistributedSampler (uneven data; drop_last=False).
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES = 7, 6, 9, 4


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
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        return FullyShardedDataParallel(
            model,
            use_orig_params=True,
            device_id=torch.device("cpu"),
            auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Block),
        )

    def indices(self, ctx):
        return list(range(ROWS))[ctx.rank :: ctx.world_size]

    def step(self, model, batch, ctx):
        mine = {k: v[self.indices(ctx)] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        count = torch.tensor(count)
        dist.all_reduce(count)
        (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def indices(self, ctx):
        num_samples = math.ceil(ROWS / ctx.world_size)
        indices = list(range(ROWS))
        indices += indices[: num_samples * ctx.world_size - ROWS]
        return indices[ctx.rank :: ctx.world_size]


EXPECT = dict(
    right=[
        (
            r"(rows?|samples?|inputs?).{0,80}(twice|two times|repeat|double|again"
            r"|more than once|2 times|factor|weight|several ranks|both ranks|times)|(twice"
            r"|repeat|double|times).{0,60}(rows?|samples?)"
        )
    ],
    place=[r"rows?|samples?|ranks?"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "The sampler pads 7 rows to 9 with the first two, so rows 0 and 1 are counted twice, in "
    "the gradient and in the count."
)
