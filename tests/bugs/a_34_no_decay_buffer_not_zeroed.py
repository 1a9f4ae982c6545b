"""Flat gradient buffers that accumulate two micro-batches before one all-reduce each. After
FAULTS class C12 (stale gradient buffer, visible at the second step).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}

ROWS, INPUTS, WIDTH, CLASSES = 9, 6, 9, 4
MICRO_BATCHES = 2


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


class FlatBuffer:
    def __init__(self, params):
        self.params = params
        self.data = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype)
        parts = self.data.split([p.numel() for p in params])
        self.views = [part.view_as(p) for part, p in zip(parts, params, strict=True)]

    def zero(self):
        self.data.zero_()

    def accumulate(self):
        for view, param in zip(self.views, self.params, strict=True):
            view.add_(param.grad)
            param.grad = None

    def finish(self, group):
        reduced = self.data
        dist.all_reduce(reduced, group=group)
        for view, param in zip(self.views, self.params, strict=True):
            param.grad = view.clone()


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
        params = list(model.parameters())
        self.decay = FlatBuffer([p for p in params if p.ndim > 1])
        self.no_decay = FlatBuffer([p for p in params if p.ndim == 1])
        return model

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        self.zero_buffers()
        for param in model.parameters():
            param.grad = None
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, micro)
            (loss / ROWS).backward()
            self.decay.accumulate()
            self.no_decay.accumulate()
        self.decay.finish(ctx.group("dp"))
        self.no_decay.finish(ctx.group("dp"))

    def zero_buffers(self):
        self.decay.zero()
        self.no_decay.zero()


class Buggy(Clean):
    def zero_buffers(self):
        self.decay.zero()


EXPECT = dict(
    right=[
        (
            r"stale|previous step|step before|earlier step|last step|not zeroed|left over"
            r"|second step|later step|first step.{0,40}right|repeat|another gradient"
        ),
        r"bias|norm",
    ],
    place=[r"bias|norm"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"micro-?batch.{0,30}(lost|dropped)",
    ],
)

WHY = (
    "The buffer of biases and norms is never zeroed: from the second step on the reduced "
    "gradient of the step before is added."
)
