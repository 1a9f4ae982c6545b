"""A vocabulary-parallel embedding with a padding index whose row gets no gradient.
After FAULTS C19-03: every shard gets the global padding index."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, PAD = 7, 6, 10, 16, 2


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the group backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the group forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class VocabParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, ids, start=0, padding_idx=PAD, group=None):
        if group is None:
            return F.embedding(ids, self.weight, padding_idx=PAD)
        here = (ids >= start) & (ids < start + len(self.weight))
        index = (ids - start).masked_fill(~here, len(self.weight))
        weight = F.pad(self.weight, (0, 0, 0, 1))  # a last row of zeros for ids of other ranks
        return SumOut.apply(F.embedding(index, weight, padding_idx=padding_idx), group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = VocabParallelEmbedding()
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, ids, *shard):
        x = self.blocks(self.embed(ids, *shard))
        return self.head(self.norm(x).mean(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        ids[:, 3] = torch.tensor([10, 4, 10, 2, 7, 10, 2])
        ids[::2, 5] = PAD
        return {"ids": ids, "labels": torch.randint(5, (ROWS,), generator=g)}

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["ids"]), rows["labels"], reduction="sum"), len(
            rows["ids"]
        )

    def distribute(self, model, ctx):
        self.start = ctx.coords["tp"] * VOCAB // ctx.axes["tp"]
        weight = model.embed.weight.chunk(ctx.axes["tp"])[ctx.coords["tp"]]
        model.embed.weight = nn.Parameter(weight.detach().clone())
        return model

    def padding_idx(self, ctx):
        at = PAD - self.start
        return at if 0 <= at < VOCAB // ctx.axes["tp"] else None

    def step(self, model, batch, ctx):
        logits = model(batch["ids"], self.start, self.padding_idx(ctx), ctx.group("tp"))
        loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
        (loss / len(batch["ids"])).backward()


class Buggy(Clean):
    def padding_idx(self, ctx):
        return PAD


EXPECT = dict(
    right=[
        r"embed",
        r"zero|missing|lost|no gradient|rows? (2|10)\b|without gradient|nothing|0 of|one row",
    ],
    place=[r"embed", r"rows? (2|10)\b", r"rank 1\b"],
    wrong=[
        r"averag",
        r"counted twice",
        r"\bforward (is )?wrong",
        r"never reduced|not reduced|missing reduction",
    ],
)
WHY = (
    "Rank 1 of tp takes the global padding index 2 as local: its row 2, token 10, has no gradient. "
    "Only that row of embed.weight is wrong."
)
