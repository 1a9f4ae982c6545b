"""FSDP2 with two accumulated micro-batches: the gradient sync is off for all but the last one.
After FAULTS C12-03 (Megatron-LM PR 7186): the last micro-batch is marked for one of the wrappers only."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, CHANNELS, STEPS, HORIZON, MICRO_BATCHES = 9, 4, 12, 3, 2


class Stage(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=dilation, dilation=dilation)
        self.out, self.norm = nn.Conv1d(8, 8, 1), nn.LayerNorm(8)

    def forward(self, x):
        y = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.out(F.glu(self.conv(y), dim=1))


class Forecaster(nn.Module):
    """A dilated convolutional forecaster with missing targets."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv1d(CHANNELS, 8, 1)
        self.stages = nn.ModuleList(Stage(2**i) for i in range(3))
        self.head = nn.Linear(8, HORIZON)

    def forward(self, x):
        x = self.proj(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(-1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Forecaster()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "series": torch.randn(ROWS, CHANNELS, STEPS, generator=g),
            "target": torch.randn(ROWS, HORIZON, generator=g),
            "seen": torch.rand(ROWS, HORIZON, generator=g) < 0.7,
        }

    def loss_sum(self, model, rows):
        error = F.smooth_l1_loss(model(rows["series"]), rows["target"], reduction="none")
        return (error * rows["seen"]).sum(), rows["seen"].sum()

    def distribute(self, model, ctx):
        for part in (*model.stages, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["seen"].sum()
        dist.all_reduce(count)
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            self.mark(model, last=i == MICRO_BATCHES - 1)
            loss, _ = self.loss_sum(model, rows)
            (loss / count).backward()

    def mark(self, model, last):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)


class Buggy(Clean):
    def mark(self, model, last):
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last, recurse=not last)


EXPECT = dict(
    right=[
        r"stages",
        (
            r"no (\.?grad|gradient)|(grad|gradient)\S* (is|are) (None|missing|zero|lost|absent)|missing|None|lost|never"
            r"|(is|are|was|were|has|have|had) (not|no) |nothing|zero|without (a )?(grad|gradient)|not (reduced|there|set|"
            r"synchroni[sz]ed|written|left)"
        ),
    ],
    place=[r"stages\.\d", r"stages"],
    wrong=[
        r"(reduced|counted|divided) (twice|again)",
        r"mean of (the )?means",
        r"(head|proj)\S* (is|are|has|have) (not|no|never|wrong|missing)",
        r"only the (last|first) micro-?batch",
        r"stale",
    ],
)
WHY = (
    "For the last micro-batch the sync is switched on again for the root wrapper alone (recurse=False), so "
    "the stages never reduce-scatter: their sharded parameters have no gradient at all; proj and head are right."
)
