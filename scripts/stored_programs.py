"""Programs as users write them, for stored_verdicts.py: right ones, and ones that end badly."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Right:
    """Two layers and a norm with running statistics, summed by hand."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        return {
            "x": torch.randn(11, 5, generator=generator),
            "y": torch.randn(11, 3, generator=generator),
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (model(rows["x"]) - rows["y"]).square().sum(), rows["y"].numel()

    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        mine = {key: value.tensor_split(ctx.world_size)[ctx.rank] for key, value in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["y"].numel()).backward()  # type: ignore[no-untyped-call]
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Raises(Right):
    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        if ctx.rank == 1:
            raise ValueError("rank 1 cannot")
        super().step(model, batch, ctx)


class Killed(Right):
    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        if ctx.rank == 1 and ctx.step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(model, batch, ctx)


class Hangs(Right):
    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        if ctx.rank == 2:
            time.sleep(600)
        super().step(model, batch, ctx)


class Unseeded(Right):
    def batch(self) -> dict[str, Tensor]:
        return {"x": torch.randn(11, 5), "y": torch.randn(11, 3)}


class Broken(Right):
    def loss_sum(self, model: nn.Module, rows: dict[str, Tensor]) -> tuple[Tensor, int]:
        raise KeyError("labels")


class Float32(Right):
    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        super().step(model, batch, ctx)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.copy_(param.grad.float())


class OneRow(Right):
    """Rank 0 leaves its last row out."""

    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        mine = {key: value.tensor_split(ctx.world_size)[ctx.rank] for key, value in batch.items()}
        if ctx.rank == 0:
            mine = {key: value[:-1] for key, value in mine.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["y"].numel()).backward()  # type: ignore[no-untyped-call]
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Forgotten(Right):
    """The last parameter is reduced by nobody."""

    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        mine = {key: value.tensor_split(ctx.world_size)[ctx.rank] for key, value in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["y"].numel()).backward()  # type: ignore[no-untyped-call]
        for param in list(model.parameters())[:-1]:
            dist.all_reduce(param.grad)


class Frozen(Right):
    """A parameter that requires no gradient on the ranks, though build() trains it."""

    def distribute(self, model: nn.Module, ctx: Any) -> nn.Module:
        list(model.parameters())[-1].requires_grad_(False)
        return model

    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        mine = {key: value.tensor_split(ctx.world_size)[ctx.rank] for key, value in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["y"].numel()).backward()  # type: ignore[no-untyped-call]
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)


class Drawn(Right):
    """Draws an unseeded factor in its step."""

    def step(self, model: nn.Module, batch: dict[str, Tensor], ctx: Any) -> None:
        factor = torch.rand((), dtype=batch["x"].dtype) + 1
        dist.broadcast(factor, 0)
        super().step(model, batch, ctx)
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(factor)
