"""Two modules on pools of unequal data parallelism: an encoder on one, a decoder on the other.

    sumgrad run topologies/two_pools.yaml

Each pool splits the rows over its own ranks, so activations go to whoever holds the row there, and
gradients come back the same way. Each module is summed over its own pool; the global count is
known to all, so no pool's size appears in any gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

ROWS, WIDTH = 11, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.decoder = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))


class TwoPools:
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return Model()

    def batch(self) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 4, generator=g),
            "y": torch.randn(ROWS, 3, generator=g),
            "valid": torch.rand(ROWS, 3, generator=g) > 0.3,
        }

    def loss_sum(self, model: nn.Module, rows: dict[str, torch.Tensor]):
        return self.error(model.decoder(model.encoder(rows["x"])), rows), rows["valid"].sum()

    @staticmethod
    def error(out, rows):
        return ((out - rows["y"]).square() * rows["valid"]).sum()

    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        return nn.ModuleDict({ctx.pool: getattr(model, ctx.pool)})

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        a, b = self.rows(ctx, ctx.rank)
        mine = {k: v[a:b] for k, v in batch.items()}
        like = torch.zeros(b - a, WIDTH, dtype=ctx.dtype, device=ctx.device)
        if ctx.pool == "encoder":
            out = model["encoder"](mine["x"])
            self.exchange(out.detach(), None, ctx)
            out.backward(self.exchange(None, like, ctx))
        else:
            hidden = self.exchange(None, like, ctx).requires_grad_()
            count = batch["valid"].sum()
            (self.error(model["decoder"](hidden), mine) / count).backward()
            self.exchange(hidden.grad, None, ctx)
        self.reduce(model, ctx)

    def reduce(self, model: nn.Module, ctx) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))

    @staticmethod
    def rows(ctx, rank: int) -> tuple[int, int]:
        """The rows [a, b) that a rank holds in its own pool."""
        ranks = next(r for r in ctx.pools.values() if rank in r)
        i, n = ranks.index(rank), len(ranks)
        return ROWS * i // n, ROWS * (i + 1) // n

    def exchange(self, sent, got, ctx):
        """Send rows to, or receive rows from, whoever holds them in the other pool."""
        a, b = self.rows(ctx, ctx.rank)
        others = [r for pool, ranks in ctx.pools.items() if pool != ctx.pool for r in ranks]
        works, parts = [], []
        for other in others:
            c, d = max(a, self.rows(ctx, other)[0]), min(b, self.rows(ctx, other)[1])
            if c < d and sent is not None:
                works.append(dist.isend(sent[c - a : d - a].contiguous(), other))
            elif c < d:
                parts.append((c - a, got.new_empty(d - c, WIDTH)))
                works.append(dist.irecv(parts[-1][1], other))
        for work in works:
            work.wait()
        for at, part in parts:
            got[at : at + len(part)] = part
        return got
