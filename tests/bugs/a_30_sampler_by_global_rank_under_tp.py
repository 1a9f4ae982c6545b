"""DTensor tensor parallelism beside data parallelism, rows drawn by a distributed sampler.
After FAULTS class C16 (accelerate and transformers: sampler of the global rank).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, INPUTS, WIDTH, CLASSES = 8, 6, 8, 5


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


class DistributedSampler:
    def __init__(self, num_replicas, rank):
        self.num_replicas, self.rank = num_replicas, rank

    def __iter__(self):
        return iter(range(self.rank, ROWS, self.num_replicas))


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
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, ctx.mesh["tp"], plan)
        return model

    def sampler(self, ctx):
        return DistributedSampler(num_replicas=ctx.axes["dp"], rank=ctx.coords["dp"])

    def step(self, model, batch, ctx):
        indices = torch.tensor(list(self.sampler(ctx)))
        mine = {k: v[indices] for k, v in batch.items()}
        loss, count = self.loss_sum(model, mine)
        count = torch.tensor(count)
        dist.all_reduce(count, group=ctx.group("dp"))
        (loss / count).backward()
        for param in model.parameters():
            grad = param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def sampler(self, ctx):
        return DistributedSampler(num_replicas=dist.get_world_size(), rank=dist.get_rank())


EXPECT = dict(
    right=[
        (
            r"(different|other|unlike|not the same|wrong|own) (rows|inputs?|samples|data|batch"
            r"|positions)|(rows|inputs?|data|batch|positions|stretch).{0,80}(differ|unlike"
            r"|other|mixed|not the same|lost|missing|twice|swap)|do(es)? not (see|read|hold"
            r"|get) the same|transposed|swapped"
        )
    ],
    place=[r"\btp\b|rank|rows|inputs?"],
    wrong=[
        r"mean of (the )?means",
        r"micro-?batch.{0,30}(lost|dropped)",
        r"(norm|bias)[a-z.]* .{0,30}never reduced",
    ],
)

WHY = (
    "The sampler takes the global rank, so the two tensor parallel ranks of a replica read "
    "different rows and mix their activations."
)
