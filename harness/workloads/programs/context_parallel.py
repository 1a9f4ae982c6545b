"""Context parallelism: keys and values gathered, the loss split over the sequence.

    sumgrad run topologies/context_parallel.yaml

Each rank of cp holds a stretch of every sequence. Keys and values travel forward by all-gather, and
their gradients come back by its transpose, a reduce-scatter. The valid tokens are counted over dp
and cp together, and every parameter is summed over both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ROWS, LENGTH, VOCABULARY, WIDTH = 5, 9, 13, 6


class Gather(torch.autograd.Function):
    """Every rank's stretch, one after the other. On gloo torch's own wants the whole world."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), dim=1)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


class Attention(nn.Module):
    """Causal attention of queries at `start` and after over all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, gather, start: int) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = gather(k), gather(v)  # (B, T, W)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        at = start + torch.arange(q.shape[1], device=x.device).view(-1, 1)
        later = torch.arange(k.shape[1], device=x.device) > at
        scores = scores.masked_fill(later, float("-inf"))
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, gather=lambda x: x, start=0):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, gather, start)
        return self.head(self.norm(x))


class ContextParallel:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model()

    def batch(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "tokens": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "targets": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "valid": torch.arange(LENGTH) < lengths,
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        return self.token_loss(model(rows["tokens"]), rows), rows["valid"].sum()

    @staticmethod
    def token_loss(logits, rows):
        targets = rows["targets"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
        return (loss * rows["valid"].flatten()).sum()

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        cp, size = ctx.coords["cp"], ctx.axes["cp"]
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        mine = {k: v.chunk(size, dim=1)[cp].contiguous() for k, v in rows.items()}
        count = self.global_count(mine, ctx)
        logits = model(mine["tokens"], self.gather(ctx), cp * (LENGTH // size))
        (self.token_loss(logits, mine) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)

    def global_count(self, mine: dict[str, torch.Tensor], ctx) -> torch.Tensor:
        count = mine["valid"].sum()
        dist.all_reduce(count)
        return count

    def gather(self, ctx):
        group = ctx.group("cp")
        return lambda x: Gather.apply(x.contiguous(), group)
