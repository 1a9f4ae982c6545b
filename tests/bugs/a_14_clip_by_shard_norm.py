"""FSDP2 with gradient clipping in the step, by a norm of the local shards. After FAULTS class
C17 (shard-local norm; DeepSpeed and FSDP1 reports).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, INPUTS, WIDTH, CLASSES = 8, 7, 10, 5


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
    after, max_norm = "clip", 0.05

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
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, self.mine(batch, ctx))
        (loss / ROWS).backward()
        self.clip([param.grad.to_local() for param in model.parameters()], ctx)

    def clip(self, grads, ctx):
        norm = self.total_norm(grads, ctx)
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)

    def total_norm(self, grads, ctx):
        squared = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(squared, group=ctx.group("dp"))
        return squared.sqrt()


class Buggy(Clean):
    def total_norm(self, grads, ctx):
        return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))


EXPECT = dict(
    right=[
        (
            r"(global|total|gradient|clip).{0,30}norm|norm.{0,60}(clip|shard|reduc|global"
            r"|total|local)|clip"
        ),
        r"shard|reduc|local|own|each rank|per rank|rank",
    ],
    place=[r"rank|shard|norm|\bdp\b"],
    wrong=[
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "Every rank clips by the norm of its own shards, not reduced over the group, so the ranks "
    "scale by unlike and too large factors."
)
