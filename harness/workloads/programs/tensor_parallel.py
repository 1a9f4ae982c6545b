"""PyTorch's tensor parallelism on DTensor, with and without sequence parallelism, under dp.

    sumgrad run topologies/tensor_parallel.yaml
    sumgrad run topologies/sequence_parallel.yaml

A hidden width of 7 over 3 ranks: no shard has the same size. The norms and the second bias are
replicated over tp; under sequence parallelism their gradients are partial sums there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

ROWS, LENGTH, WIDTH, HIDDEN = 7, 6, 5, 7


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TensorParallel:
    sequence = False

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))

    def batch(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (ROWS, LENGTH, WIDTH)
        return {
            "x": torch.randn(shape, generator=g),
            "y": torch.randn(shape, generator=g),
            "weight": torch.rand(ROWS, LENGTH, 1, generator=g),
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        error = (model(rows["x"]) - rows["y"]).square()
        return (error * rows["weight"]).sum(), rows["weight"].sum()

    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        tp = ctx.mesh["tp"]
        for block in (model[0], model[1]):
            parallelize_module(block, tp, self.plan())
        if self.sequence:
            ends = {"2": SequenceParallel()}
            parallelize_module(model, tp, ends)
        return model

    def plan(self):
        if not self.sequence:
            return {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        return {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        dp, size = ctx.group("dp"), ctx.axes["dp"]
        mine = {k: v.tensor_split(size)[ctx.coords["dp"]] for k, v in batch.items()}
        count = mine["weight"].sum()
        dist.all_reduce(count, group=dp)
        if self.sequence:  # every rank of tp has a stretch of each sequence
            at, tp = ctx.coords["tp"], ctx.axes["tp"]
            mine = {k: v.chunk(tp, dim=1)[at] for k, v in mine.items()}
            shape = torch.Size((len(mine["x"]), LENGTH, WIDTH))
            x = DTensor.from_local(
                mine["x"],
                ctx.mesh["tp"],
                [Shard(1)],
                shape=shape,
                stride=(LENGTH * WIDTH, WIDTH, 1),
            )
            out = model(x).to_local()
        else:
            out = model(mine["x"])
        loss = ((out - mine["y"]).square() * mine["weight"]).sum()
        (loss / count).backward()
        self.reduce(model, ctx)

    def reduce(self, model: nn.Module, ctx) -> None:
        for param in model.parameters():
            grad = param.grad
            if isinstance(grad, DTensor):
                if any(p.is_partial() for p in grad.placements):
                    param.grad = grad.redistribute(placements=param.placements)
                grad = param.grad.to_local()
            dist.all_reduce(grad, group=ctx.group("dp"))


class SequenceTensorParallel(TensorParallel):
    sequence = True
