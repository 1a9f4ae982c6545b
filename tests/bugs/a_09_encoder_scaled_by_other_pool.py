"""A vision encoder and a language model on pools of unlike data parallel size. After FAULTS
C03-07 (Megatron-Bridge PR 4066).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"encoder": {"axes": {"dp": 3}}, "llm": {"axes": {"dp": 2}}}}

ROWS, PIXELS, WIDTH, OUT = 10, 6, 8, 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict(
            {"patch": nn.Linear(PIXELS, 2 * WIDTH), "projector": nn.Linear(2 * WIDTH, WIDTH)}
        )
        self.llm = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, OUT)})


def encode(part, x):
    return part["projector"](torch.tanh(part["patch"](x)))


def decode(part, x):
    return part["head"](part["norm"](x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, PIXELS, generator=g),
            "y": torch.randn(ROWS, OUT, generator=g),
            "valid": torch.rand(ROWS, OUT, generator=g) > 0.3,
        }

    def loss_sum(self, model, rows):
        out = decode(model.llm, encode(model.encoder, rows["pixels"]))
        return self.error(out, rows), rows["valid"].sum()

    @staticmethod
    def error(out, rows):
        return ((out - rows["y"]).square() * rows["valid"]).sum()

    def distribute(self, model, ctx):
        return nn.ModuleDict({ctx.pool: getattr(model, ctx.pool)})

    def step(self, model, batch, ctx):
        first, end = self.span(ctx, ctx.rank)
        mine = {k: v[first:end] for k, v in batch.items()}
        llm_dp = len(ctx.pools["llm"])
        if ctx.pool == "encoder":
            features = encode(model["encoder"], mine["pixels"])
            self.send(features.detach(), ctx)
            features.backward(self.receive(torch.zeros_like(features), ctx))
        else:
            features = self.receive(torch.zeros(end - first, WIDTH, dtype=ctx.dtype), ctx)
            features.requires_grad_()
            loss = self.error(decode(model["llm"], features), mine)
            (loss * llm_dp / batch["valid"].sum()).backward()
            self.send(features.grad, ctx)
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))
            param.grad /= self.average_over(ctx)

    def average_over(self, ctx):
        return len(ctx.pools["llm"])  # the loss was scaled by this

    @staticmethod
    def span(ctx, rank):
        ranks = next(r for r in ctx.pools.values() if rank in r)
        i, n = ranks.index(rank), len(ranks)
        return ROWS * i // n, ROWS * (i + 1) // n

    def overlaps(self, ctx):
        """(other rank, first row, last row) that this rank shares with the other pool."""
        first, end = self.span(ctx, ctx.rank)
        for pool, ranks in ctx.pools.items():
            for other in ranks if pool != ctx.pool else []:
                a, b = self.span(ctx, other)
                a, b = max(a, first), min(b, end)
                if a < b:
                    yield other, a - first, b - first

    def send(self, rows, ctx):
        works = [dist.isend(rows[a:b].contiguous(), to) for to, a, b in self.overlaps(ctx)]
        for work in works:
            work.wait()

    def receive(self, into, ctx):
        parts = [(a, b, torch.empty_like(into[a:b]), o) for o, a, b in self.overlaps(ctx)]
        works = [dist.irecv(part, other) for _, _, part, other in parts]
        for work in works:
            work.wait()
        for a, b, part, _ in parts:
            into[a:b] = part
        return into


class Buggy(Clean):
    def average_over(self, ctx):
        return ctx.axes["dp"]  # each module has a DDP of its own


EXPECT = dict(
    right=[r"encoder", r"0\.66|2/3|2 / 3|1\.5\b|3/2|size of|averag|scale|factor"],
    place=[r"encoder"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"llm\.[a-z.]+ (is|are) wrong",
    ],
)

WHY = (
    "The loss is scaled by the llm pool's size 2, but the encoder averages over its own 3 "
    "ranks: the encoder's gradients are 2/3."
)
