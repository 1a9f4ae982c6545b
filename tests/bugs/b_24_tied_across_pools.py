"""Encoder and decoder on two pools; the encoder's token table is also the decoder's output layer.
After FAULTS C11-04: tied copies on different actors, each with its own pool's gradient."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"encoder": {"axes": {"dp": 2}}, "decoder": {"axes": {"dp": 3}}}}
ROWS, WIDTH, VOCAB = 9, 8, 12


class Half(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        return x + torch.tanh(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        table = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = Half(table), Half(table)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS,), generator=g),
            "labels": torch.randint(VOCAB, (ROWS,), generator=g),
        }

    @staticmethod
    def decode(decoder, x, labels):
        logits = decoder.body(x) @ decoder.table.weight.T
        return F.cross_entropy(logits, labels, reduction="sum")

    def loss_sum(self, model, rows):
        x = model.encoder.body(model.encoder.table(rows["ids"]))
        return self.decode(model.decoder, x, rows["labels"]), len(rows["ids"])

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

    def step(self, model, batch, ctx):
        a, b = self.held(ctx, ctx.rank)
        part = model[ctx.pool]
        if ctx.pool == "encoder":
            out = part.body(part.table(batch["ids"][a:b]))
            self.exchange(ctx, out.detach())
            out.backward(self.exchange(ctx))
        else:
            x = self.exchange(ctx).requires_grad_()
            (self.decode(part, x, batch["labels"][a:b]) / ROWS).backward()
            self.exchange(ctx, x.grad)
        self.reduce(part, ctx)

    def reduce(self, part, ctx):
        for param in part.parameters():
            if param is not part.table.weight:
                dist.all_reduce(param.grad, group=ctx.group("dp"))
        dist.all_reduce(part.table.weight.grad)


class Buggy(Clean):
    def reduce(self, part, ctx):
        for param in part.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


EXPECT = dict(
    right=[
        r"table",
        r"own (part|share|pool)|not (summed|reduced)|never (summed|reduced)|missing|partial|lacks?"
        r"|tied|shared|other (use|pool)|one (use|pool)|only",
    ],
    place=[r"table", r"encoder|decoder|pool"],
    wrong=[
        r"averag",
        r"counted twice",
        r"\bforward (is )?wrong",
        r"(norm|mlp)\S* (is|are) not reduced",
    ],
)
WHY = (
    "The tied table is summed within each pool only: the encoder pool has the input part, the "
    "decoder pool the output part of its gradient, and nobody adds the two."
)
