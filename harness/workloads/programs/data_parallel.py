"""Plain data parallelism: micro-batches, unequal token counts, one all-reduce a parameter.

    sumgrad run topologies/data_parallel.yaml

Every rank divides by the global token count before backward, so gradients are partial SUMs: they
accumulate over micro-batches by themselves, and one SUM over the ranks finishes them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

ROWS, LENGTH, VOCABULARY, WIDTH = 13, 6, 17, 5
MICRO_BATCHES = 2


class Model(nn.Module):
    """Predicts the next token from the last one and a running mean of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (B, T) -> (B, T, V)
        x = self.embed(tokens)
        steps = torch.arange(1, tokens.shape[1] + 1, device=x.device).view(1, -1, 1)
        x = x + self.down(torch.tanh(self.up(self.norm(x.cumsum(1) / steps))))
        return self.head(x)


class DataParallel:
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
        loss = F.cross_entropy(
            model(rows["tokens"]).flatten(0, 1), rows["targets"].flatten(), reduction="none"
        )
        return (loss * rows["valid"].flatten()).sum(), rows["valid"].sum()

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = self.global_count(mine)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, micro)
            (loss / count).backward()
        self.reduce(model)

    def global_count(self, mine: dict[str, torch.Tensor]) -> torch.Tensor:
        count = mine["valid"].sum()
        dist.all_reduce(count)
        return count

    def reduce(self, model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)
