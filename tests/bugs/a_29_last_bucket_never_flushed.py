"""Gradients are copied into buckets and reduced as soon as a bucket is full. After FAULTS
class C08 and C13 (bucketed reduction in trainers of their own).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES = 8, 7, 10, 4
BUCKET = 300


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


class Bucket:
    def __init__(self, group):
        self.group, self.grads = group, []

    def add(self, grad):
        self.grads.append(grad)
        if sum(g.numel() for g in self.grads) >= BUCKET:
            self.flush()

    def flush(self):
        if not self.grads:
            return
        flat = torch.cat([grad.flatten() for grad in self.grads])
        dist.all_reduce(flat, group=self.group)
        for grad, part in zip(self.grads, flat.split([g.numel() for g in self.grads]), strict=True):
            grad.copy_(part.view_as(grad))
        self.grads = []


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

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss / ROWS).backward()
        self.reduce(model, ctx)

    def reduce(self, model, ctx):
        bucket = Bucket(ctx.group("dp"))
        for param in reversed(list(model.parameters())):
            bucket.add(param.grad)
        bucket.flush()


class Buggy(Clean):
    def reduce(self, model, ctx):
        bucket = Bucket(ctx.group("dp"))
        for param in reversed(list(model.parameters())):
            bucket.add(param.grad)


EXPECT = dict(
    right=[
        (
            r"not reduced|never reduced|not summed|never summed|missing.{0,40}(reduc|sum)"
            r"|unreduced|without (a |the |any )?(reduc|all.?reduce|sum)|own (part|share|rows"
            r"|contribution)|partial|no (reduc|all.?reduce|collective)|lacks? .{0,60}(rank"
            r"|part|sum|reduc)|only (its|their|the) own|(reduction|all.?reduce"
            r"|sum).{0,40}(missing|left out|skipped|absent)|stays? local|local to (each|its)"
            r"|out of the reduc|local|no collective"
        ),
        r"stem|blocks\.0\.norm",
    ],
    place=[r"stem|blocks\.0\.norm"],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"mean of (the )?means",
        r"head\.(weight|bias).{0,30}(not reduced|wrong)",
    ],
)

WHY = (
    "What is left in the last, not full bucket (stem and blocks.0.norm) is never reduced and "
    "stays local."
)
