"""A vocabulary-parallel embedding in front of a small classifier of token bags. After FAULTS
class C19 (global token ids as shard-local indices).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}

ROWS, LENGTH, VOCABULARY, INPUTS, WIDTH, CLASSES = 6, 5, 15, 8, 8, 4


class SumOut(torch.autograd.Function):
    """SUM over the tensor parallel ranks forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def sum_out(x, group):
    return x if group is None else SumOut.apply(x, group)


def cut(param, dim, ctx):
    """This rank's part of a weight."""
    return nn.Parameter(param.detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone())


class VocabParallelEmbedding(nn.Embedding):
    group, first, check_end = None, 0, True

    def forward(self, ids):
        if self.group is None:
            return super().forward(ids)
        size = len(self.weight)
        outside = ids < self.first
        if self.check_end:
            outside |= ids >= self.first + size
        out = F.embedding((ids - self.first).clamp(0, size - 1), self.weight)
        return sum_out(out.masked_fill(outside[..., None], 0.0), self.group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        x = self.word_embeddings(ids).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Clean:
    check_end = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["ids"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        embedding = model.word_embeddings
        embedding.weight = cut(embedding.weight, 0, ctx)
        embedding.first = ctx.coords["tp"] * len(embedding.weight)
        embedding.group, embedding.check_end = ctx.group("tp"), self.check_end
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, batch)
        (loss / count).backward()


class Buggy(Clean):
    check_end = False


EXPECT = dict(
    right=[r"forward|output", r"embed"],
    place=[r"embed"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"backward .{0,20}wrong.{0,40}head",
        r"averag",
    ],
)

WHY = (
    "Tokens past the end of a shard are not masked but clamped to its last row, so ranks 0 "
    "and 1 add that row: the embedding's output is wrong."
)
