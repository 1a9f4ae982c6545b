"""FSDP2 over the shard axis, replicas summed by hand at the end of the accumulation. After FAULTS
C12-12 (pytorch PR 125484): earlier micro-batches must be added before the replicas' all-reduce.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replica": 2, "shard": 2}}}}

ROWS, SIZE, CHANNELS, CLASSES, MICRO_BATCHES = 14, 6, 7, 5, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.norm = nn.LayerNorm(CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 15), nn.Linear(15, CHANNELS)

    def forward(self, x):
        y = self.depthwise(x).movedim(1, -1)
        y = self.down(F.gelu(self.up(self.norm(y))))
        return x + y.movedim(-1, 1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 2, stride=2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean((-2, -1))))


class Clean:
    num_microbatches = MICRO_BATCHES

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 3, SIZE, SIZE, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh["shard"])
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def over_replicas(self, earlier, last, group):
        total = earlier + last
        dist.all_reduce(total, group=group)
        return total

    def step(self, model, batch, ctx):
        ranks = ctx.axes["replica"] * ctx.axes["shard"]
        at = ctx.coords["replica"] * ctx.axes["shard"] + ctx.coords["shard"]
        mine = {k: v.tensor_split(ranks)[at] for k, v in batch.items()}
        params = list(model.parameters())
        earlier = [torch.zeros_like(p.to_local()) for p in params]
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            (self.loss_sum(model, rows)[0] / ROWS).backward()
            if i < MICRO_BATCHES - 1:
                for kept, param in zip(earlier, params):
                    kept += param.grad.to_local()
                    param.grad = None
        for kept, param in zip(earlier, params):
            last = param.grad.to_local()
            last.copy_(self.over_replicas(kept, last.clone(), ctx.group("replica")))


class Buggy(Clean):
    def over_replicas(self, earlier, last, group):
        dist.all_reduce(last, group=group)
        return earlier + last


EXPECT = dict(
    right=[
        r"replica",
        r"earlier|last|first|micro.?batch|partial|own|other|missing|lack|not (all )?(summed|reduced"
        r"|added)|never|unlike|differ|lost|only|rows",
    ],
    place=[r"replica", r"micro.?batch|rows?", r"ranks?"],
    wrong=[
        r"(never|not) (been )?(summed|reduced) over (the )?shard",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag",
        r"forward (pass )?(is wrong|differs)",
        r"last micro.?batch('s \w+)? (is|are|was) (lost|missing|dropped|not reduced)",
    ],
)

WHY = (
    "Only the last micro-batch's gradient crosses the replica axis; what the earlier micro-batches "
    "gave is summed over the shard axis alone, so each replica lacks the other's earlier rows and "
    "the replicas differ."
)
