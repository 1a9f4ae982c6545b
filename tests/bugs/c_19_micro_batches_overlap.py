"""Gradient accumulation under DDP, micro-batches cut from the global batch by a start index.
After FAULTS class C12 (accumulation windows of own data loaders): the stride leaves out the ranks."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
MICRO_BATCH, ACCUMULATE, POINTS, CLASSES = 2, 2, 6, 4
ROWS = 3 * MICRO_BATCH * ACCUMULATE


class PointNet(nn.Module):
    """Point clouds: a shared MLP, a learned alignment, a soft pooling."""

    def __init__(self):
        super().__init__()
        self.align = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 9))
        self.points = nn.Sequential(nn.Linear(3, 12), nn.GELU(), nn.Linear(12, 10))
        self.pool, self.classify = nn.Linear(10, 1, bias=False), nn.Linear(10, CLASSES)

    def forward(self, x):
        x = x @ (torch.eye(3, dtype=x.dtype) + self.align(x).mean(1).unflatten(-1, (3, 3)))
        y = self.points(x)
        return self.classify((self.pool(y).softmax(1) * y).sum(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return PointNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "clouds": torch.randn(ROWS, POINTS, 3, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["clouds"])
        return F.cross_entropy(logits, rows["labels"], reduction="sum"), len(logits)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def start(self, i, ctx):
        return (i * ctx.world_size + ctx.rank) * MICRO_BATCH

    def step(self, model, batch, ctx):
        for i in range(ACCUMULATE):
            start = self.start(i, ctx)
            rows = {k: v[start : start + MICRO_BATCH] for k, v in batch.items()}
            with contextlib.nullcontext() if i == ACCUMULATE - 1 else model.no_sync():
                loss = F.cross_entropy(model(rows["clouds"]), rows["labels"])
                (loss / ACCUMULATE).backward()


class Buggy(Clean):
    def start(self, i, ctx):
        return (i + ctx.rank) * MICRO_BATCH


EXPECT = dict(
    right=[
        r"rows?\b|samples?",
        (
            r"twice|two times|2 times|more than once|repeated|duplicat|missing|lost|dropped|never|absent"
            r"|not (used|seen|counted|in|there)|\b0 times|weights? (of )?[02]|overlap|zero times|no rank"
        ),
    ],
    place=[r"rows? \W?\d", r"rows?", r"sampl"],
    wrong=[
        r"gradients? (is|are|was|were) (not|never) (all-)?reduced|missing (all.?)?reduc",
        r"mean of (the )?means|own count",
        r"reduced (twice|again)",
        r"forward (is|was) wrong|backward (is|was) wrong",
        r"stale|not zeroed",
    ],
)
WHY = (
    "The start index advances by one micro-batch instead of one per rank, so neighbouring ranks overlap: "
    "rows 2 to 5 are used twice and rows 8 to 11 by no rank."
)
