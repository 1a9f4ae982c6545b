"""Continual learning with elastic weight consolidation under FSDP2 on three ranks: cross entropy of the new task plus lambda/2 sum F (w - w*)^2, with the old weights w* and the Fisher information F kept as full tensors on each rank. Sizes do not divide evenly. Two
micro-batches, sync in the last one; after backward the penalty's gradient is added by hand to each sharded gradient, from the rows of F and w* that belong to the rank's shard.

The bug: F and w* are cut to the first rows, as many as the shard has, on every rank, instead of the rows where the shard begins. After EWC/L2-SP plugins made for DDP and ported to FSDP2's DTensor parameters (to_local() and full reference tensors).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, FEATURES, WIDTH, CLASSES, STRENGTH = 8, 5, 7, 4, 0.6


class TaskNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        for name, p in list(self.named_parameters()):
            key = name.replace(".", "_")
            self.register_buffer("old_" + key, (p + 0.3 * torch.randn_like(p)).detach())
            self.register_buffer("fisher_" + key, torch.rand_like(p).detach())

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        return self.head(x + torch.tanh(self.middle(x)))

    def memory(self, name):
        key = name.replace(".", "_")
        return getattr(self, "old_" + key), getattr(self, "fisher_" + key)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"task": self.loss_sum, "ewc": self.penalty}

    def build(self):
        torch.manual_seed(self.seed)
        return TaskNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["labels"], reduction="sum"), len(rows["x"])

    def penalty(self, model, rows):
        total = 0
        for name, p in model.named_parameters():
            old, fisher = model.memory(name)
            total = total + STRENGTH / 2 * (fisher * (p - old).square()).sum()
        return total, 1

    def distribute(self, model, ctx):
        for module in (model.inner, model.middle, model.head):
            fully_shard(module, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def memory_shard(self, full, local, ctx):
        """The rows of a full tensor that lie in this rank's shard (chunks along the first dimension)."""
        rows = -(-full.shape[0] // ctx.axes["dp"])
        start = min(rows * ctx.coords["dp"], full.shape[0])
        return full[start : start + local.shape[0]]

    def add_penalty(self, model, ctx):
        with torch.no_grad():
            for name, p in model.named_parameters():
                local = p.to_local()
                old, fisher = (self.memory_shard(t, local, ctx) for t in model.memory(name))
                p.grad.to_local().add_(STRENGTH * fisher * (local - old))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        for i in range(2):
            model.set_requires_gradient_sync(i == 1)
            loss, _ = self.loss_sum(model, {k: x.tensor_split(2)[i] for k, x in mine.items()})
            (loss * ctx.axes["dp"] / ROWS).backward()
        self.add_penalty(model, ctx)


class Buggy(Clean):
    def memory_shard(self, full, local, ctx):
        return full[: local.shape[0]]


EXPECT = dict(
    right=[
        r"penalty|ewc|old|fisher|memory|anchor|added",
        r"rows|shard|slice|offset|start|rank 0|first|other part|own part|add_penalty|ranks? (1|2)",
    ],
    place=[r"memory_shard", r"add_penalty", r"\bewc\b|penalty", r"fisher|old_|memory"],
    wrong=[
        r"not reduced|never reduced|missing (all.?)?reduc|reduced twice|no sync|gradient sync",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten|twice|again)",
        r"divisor|mean of means|token count|divided by (the )?world",
        r"penalty.{0,30}(times|twice|counted|every rank)",
    ],
)
WHY = (
    "FSDP2 cuts a parameter of 7 rows into 3, 3 and 1; rank 1 has rows 3 to 5, rank 2 row 6, but the penalty's gradient is made with rows 0 to 2 (or row 0) of F and w* on each rank. Rank 0 is right; on ranks 1 and 2 the penalty's part of every sharded gradient "
    "belongs to other rows, the cross entropy's part is right. A right cause says that the EWC term/the tensors added after backward come from the wrong rows (the first shard's) on ranks 1 and 2. "
    "Fix: start at rank times the chunk size."
)
