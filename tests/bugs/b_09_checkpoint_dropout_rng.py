"""Activation checkpointing of blocks with dropout under DDP; the masks are seeded per sample.
After FAULTS C15-01: preserve_rng_state=False, harmless until a model with dropout came."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, CLASSES = 8, 12, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.drop, self.down = nn.Dropout(0.3), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.preserve = True

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return self.head(x)


class Clean:
    preserve = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 6, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
            "sample": torch.arange(ROWS) + 100,
        }

    def loss_sum(self, model, rows):
        loss = 0.0
        for x, y, sample in zip(rows["x"], rows["y"], rows["sample"], strict=True):
            torch.manual_seed(int(sample))
            loss = loss + F.cross_entropy(model(x[None]), y[None])
        return loss, len(rows["x"])

    def distribute(self, model, ctx):
        model.preserve = self.preserve
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = 0.0
        for x, y, sample in zip(mine["x"], mine["y"], mine["sample"], strict=True):
            torch.manual_seed(int(sample))
            loss = loss + F.cross_entropy(model(x[None]), y[None])
        (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    preserve = False


EXPECT = dict(
    right=[r"backward|recomput|checkpoint|forward.*(twice|again)", r"blocks|block"],
    place=[r"blocks?\.[012]", r"up|down|drop"],
    wrong=[r"averag", r"counted twice", r"never reduced|not reduced|missing reduction"],
)
WHY = (
    "Checkpointed blocks are recomputed with other dropout masks: the forward is right, the "
    "backward of blocks.0-2 belongs to another mask; head's gradient is right."
)
