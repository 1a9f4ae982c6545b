"""PyTorch's pipeline schedules: GPipe, 1F1B, interleaved 1F1B.

    sumgrad run examples/pp3.yaml --workload examples/pipelines.py:GPipe

Each rank runs its stages over micro-batches. The division by micro-batches that a schedule does by
itself is switched off: the loss is divided by the rows of all of them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F
from wrappers import CLASSES, WIDTH, Block, Plain

ROWS, STAGES = 12, 6


class GPipe(Plain):
    schedule, stages_of_a_rank, micro_batches = ScheduleGPipe, 1, 4

    def build(self):
        torch.manual_seed(self.seed)
        return nn.Sequential(*(Block() for _ in range(STAGES - 1)), nn.Linear(WIDTH, CLASSES))

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, WIDTH, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        pieces = ctx.world_size * self.stages_of_a_rank
        size = STAGES // pieces
        mine = range(ctx.rank, pieces, ctx.world_size)
        parts = {str(i): model[i * size : (i + 1) * size] for i in mine}
        self.stages = [PipelineStage(part, int(i), pieces, ctx.device) for i, part in parts.items()]
        return nn.ModuleDict(parts)

    def step(self, model, batch, ctx):
        def loss(out, target):
            return F.cross_entropy(out, target, reduction="sum") / ROWS

        given = self.stages if self.stages_of_a_rank > 1 else self.stages[0]
        schedule = self.schedule(given, self.micro_batches, loss_fn=loss, scale_grads=False)
        x = [batch["x"]] if ctx.rank == 0 else []
        target = {"target": batch["y"]} if ctx.rank == ctx.world_size - 1 else {}
        schedule.step(*x, **target)


class OneForwardOneBackward(GPipe):
    schedule = Schedule1F1B


class Interleaved(GPipe):
    schedule, stages_of_a_rank, micro_batches = ScheduleInterleaved1F1B, 2, 3


class DataAndPipeline(GPipe):
    """Two pipelines side by side; each stage's gradients are summed over both."""

    def distribute(self, model, ctx):
        self.place, self.depth = ctx.coords["pp"], ctx.axes["pp"]
        size = STAGES // self.depth
        part = model[self.place * size : (self.place + 1) * size]
        self.stages = [
            PipelineStage(part, self.place, self.depth, ctx.device, group=ctx.group("pp"))
        ]
        return nn.ModuleDict({str(self.place): part})

    def step(self, model, batch, ctx):
        def loss(out, target):
            return F.cross_entropy(out, target, reduction="sum") / ROWS

        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        schedule = ScheduleGPipe(self.stages[0], 2, loss_fn=loss, scale_grads=False)
        x = [mine["x"]] if self.place == 0 else []
        target = {"target": mine["y"]} if self.place == self.depth - 1 else {}
        schedule.step(*x, **target)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))
