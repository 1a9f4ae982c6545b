"""A causal language model on a cut sequence: the labels are the ids shifted by one.
After transformers/accelerate reports: each rank of the context axis shifts its own shard."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB = 5, 12, 8, 13


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, start, gather):
        k, v = gather(self.kv(x)).chunk(2, dim=-1)
        scores = self.q(x) @ k.transpose(1, 2) / WIDTH**0.5
        at = start + torch.arange(x.shape[1])[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[1]) > at, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attn, self.mlp = Attention(), Mlp()
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, start=0, gather=lambda t: t):
        x = self.embed(ids)
        x = x + self.attn(x, start, gather)
        return self.lm_head(self.norm(x + self.mlp(x)))


def shifted(ids):
    """Label of a position: the id after it; the last one has none."""
    return F.pad(ids[:, 1:], (0, 1), value=-100)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        labels = shifted(rows["ids"])
        return self.token_loss(model(rows["ids"]), labels), (labels != -100).sum()

    def shards(self, ids, ctx):
        size, at = ctx.axes["cp"], ctx.coords["cp"]
        return ids.chunk(size, dim=1)[at], shifted(ids).chunk(size, dim=1)[at]

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        ids, labels = self.shards(batch["ids"], ctx)
        count = (labels != -100).sum()
        dist.all_reduce(count, group=group)
        start = ctx.coords["cp"] * ids.shape[1]
        logits = model(
            ids, start, lambda t: torch.cat(collective.all_gather(t.contiguous(), group), dim=1)
        )
        (self.token_loss(logits, labels) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def shards(self, ids, ctx):
        ids = ids.chunk(ctx.axes["cp"], dim=1)[ctx.coords["cp"]]
        return ids, shifted(ids)


EXPECT = dict(
    right=[
        r"label|target|token|position|column|loss",
        r"lost|missing|dropped|left out|not counted|fewer|ignored|border|edge|count|differ",
    ],
    place=[r"loss", r"label|target", r"lm_head", r"position|column|token"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted (twice|3 times)"],
)
WHY = (
    "Labels are shifted after the cut, so the last position of each shard has no label: two of "
    "eleven tokens of each row are lost, and the count with them."
)
