"""Two pools: an encoder with a commitment term on its outputs, a decoder with the reconstruction.
After reports on VQ models on uneven pools: the term is divided by the rank's own rows."""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"encoder": {"axes": {"dp": 2}}, "decoder": {"axes": {"dp": 3}}}}
ROWS, INPUTS, WIDTH, COMMIT = 11, 6, 8, 0.3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(INPUTS, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, WIDTH)
        )
        self.decoder = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, INPUTS))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"reconstruction": self.reconstruction, "commitment": self.commitment}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "code": torch.randn(ROWS, WIDTH, generator=g),
        }

    @staticmethod
    def error(out, rows):
        return (out - rows["x"]).square().sum()

    @staticmethod
    def distance(z, rows):
        return COMMIT * (z - rows["code"]).square().sum()

    def reconstruction(self, model, rows):
        return self.error(model.decoder(model.encoder(rows["x"])), rows), len(rows["x"])

    def commitment(self, model, rows):
        return self.distance(model.encoder(rows["x"]), rows), len(rows["x"])

    def loss_sum(self, model, rows):
        loss = self.reconstruction(model, rows)[0] + self.commitment(model, rows)[0]
        return loss, len(rows["x"])

    def distribute(self, model, ctx):
        return nn.ModuleDict({ctx.pool: getattr(model, ctx.pool)})

    @staticmethod
    def held(ctx, rank):
        """The rows [a, b) of a rank in its own pool."""
        ranks = next(r for r in ctx.pools.values() if rank in r)
        at, n = list(ranks).index(rank), len(ranks)
        return ROWS * at // n, ROWS * (at + 1) // n

    def exchange(self, ctx, sent=None):
        """Rows go to, or come from, whoever holds them in the other pool."""
        a, b = self.held(ctx, ctx.rank)
        got, works, parts = torch.zeros(b - a, WIDTH, dtype=ctx.dtype), [], []
        for other in (r for pool, ranks in ctx.pools.items() if pool != ctx.pool for r in ranks):
            c, d = self.held(ctx, other)
            c, d = max(a, c), min(b, d)
            if c < d and sent is not None:
                parts.append((c, sent[c - a : d - a].contiguous()))
                works.append(dist.isend(parts[-1][1], other))
            elif c < d:
                parts.append((c, torch.empty(d - c, WIDTH, dtype=ctx.dtype)))
                works.append(dist.irecv(parts[-1][1], other))
        for work in works:
            work.wait()
        for c, part in parts:
            got[c - a : c - a + len(part)] = part
        return got

    def rows_counted(self, mine):
        return ROWS

    def step(self, model, batch, ctx):
        a, b = self.held(ctx, ctx.rank)
        mine = {k: v[a:b] for k, v in batch.items()}
        if ctx.pool == "encoder":
            z = model["encoder"](mine["x"])
            self.exchange(ctx, z.detach())
            commitment = self.distance(z, mine) / self.rows_counted(mine)
            torch.autograd.backward([commitment, z], [None, self.exchange(ctx)])
        else:
            z = self.exchange(ctx).requires_grad_()
            (self.error(model["decoder"](z), mine) / ROWS).backward()
            self.exchange(ctx, z.grad)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def rows_counted(self, mine):
        return len(mine["x"])


EXPECT = dict(
    right=[
        r"commitment|encoder",
        r"own (rows|count)|local (rows|count)|count of (its|each|the)|its own|rank'?s? (own )?"
        r"(rows|count)|sum of (the )?means|mean of (the )?means|normali[sz]",
    ],
    place=[r"commitment", r"encoder"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"decoder\S* (is|are) wrong",
        r"reconstruction (is )?(wrong|times)",
        r"micro.?batch",
    ],
)
WHY = (
    "In the encoder pool the commitment term is divided by the rank's own rows (5 and 6 of 11) and "
    "then summed: about 2.2 and 1.8 times its gradient; the reconstruction and decoder are right."
)
