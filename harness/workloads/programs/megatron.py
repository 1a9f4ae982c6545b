"""Tensor parallelism by hand, as Megatron-LM has it: two autograd functions, weights cut by hand.

    sumgrad run topologies/megatron.yaml

`copy_in` is the identity forward and a SUM backward; `sum_out` is a SUM forward and the identity
backward. The embedding is cut by vocabulary, the hidden layer by columns, then rows; the last bias
is replicated and added once, after the SUM. Nothing says how the weights are cut: sumgrad finds
each shard by its values.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ROWS, LENGTH, VOCABULARY, WIDTH, HIDDEN = 7, 5, 13, 6, 8
SMOOTHING = 0.1


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        out = x.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH) / 10)


class Model(nn.Module):
    def __init__(self, vocabulary: int = VOCABULARY, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Mlp(hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)


class Megatron:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model()

    def batch(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tokens": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "targets": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "valid": torch.rand(ROWS, LENGTH, generator=g) > 0.3,
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        return self.token_loss(self.forward(model, rows["tokens"], None), rows), rows["valid"].sum()

    @staticmethod
    def token_loss(logits, rows):
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["targets"].flatten(), reduction="none",
            label_smoothing=SMOOTHING,
        )  # fmt: skip
        return (loss * rows["valid"].flatten()).sum()

    def forward(self, model: nn.Module, tokens: torch.Tensor, ctx) -> torch.Tensor:
        """On one process (ctx is None) or on a rank's shards: the same lines."""
        x = self.sum_out(self.embed(model, tokens, ctx), ctx)
        for layer in model.layers:
            hidden = torch.tanh(layer.up(self.copy_in(layer.norm(x), ctx)))
            x = x + self.out(layer, hidden, ctx)
        return model.head(x)

    def out(self, layer: nn.Module, hidden: torch.Tensor, ctx) -> torch.Tensor:
        return self.sum_out(layer.down(hidden), ctx) + layer.bias

    def embed(self, model: nn.Module, tokens: torch.Tensor, ctx) -> torch.Tensor:
        if ctx is None:
            return model.embed(tokens)
        start, size = self.cut(VOCABULARY, ctx)
        here = (tokens >= start) & (tokens < start + size)
        return model.embed((tokens - start).clamp(0, size - 1)) * here[..., None]

    def copy_in(self, x: torch.Tensor, ctx) -> torch.Tensor:
        return x if ctx is None else _CopyIn.apply(x, ctx.group("tp"))

    def sum_out(self, x: torch.Tensor, ctx) -> torch.Tensor:
        return x if ctx is None else _SumOut.apply(x, ctx.group("tp"))

    @staticmethod
    def cut(size: int, ctx) -> tuple[int, int]:
        """Where this rank's part of a dimension begins, and its size."""
        i, n = ctx.coords["tp"], ctx.axes["tp"]
        start = size * i // n
        return start, size * (i + 1) // n - start

    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        (v, vocabulary), (h, hidden) = self.cut(VOCABULARY, ctx), self.cut(HIDDEN, ctx)
        local = Model(vocabulary, hidden).to(device=ctx.device, dtype=ctx.dtype)
        with torch.no_grad():
            local.load_state_dict(model.state_dict() | self.shards(model, v, vocabulary, h, hidden))
        return local

    @staticmethod
    def shards(model: nn.Module, v: int, vocabulary: int, h: int, hidden: int):
        out = {"embed.weight": model.embed.weight[v : v + vocabulary]}
        for i, layer in enumerate(model.layers):
            out[f"layers.{i}.up.weight"] = layer.up.weight[h : h + hidden]
            out[f"layers.{i}.up.bias"] = layer.up.bias[h : h + hidden]
            out[f"layers.{i}.down.weight"] = layer.down.weight[:, h : h + hidden]
        return out

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        dp = ctx.group("dp")
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        count = mine["valid"].sum()
        dist.all_reduce(count, group=dp)
        loss = self.token_loss(self.forward(model, mine["tokens"], ctx), mine)
        (loss / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=dp)
