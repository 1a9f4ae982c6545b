"""Context parallelism with the balanced (zigzag) cut: every rank holds an early and a late chunk.
After Megatron/transformers reports: position ids are made as if the cut was contiguous."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB = 6, 12, 8, 14


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, at, gather):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v, there = gather(k), gather(v), gather(at)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        scores = scores.masked_fill(there[0] > at[0, :, None], float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()

    def forward(self, x, at, gather):
        return x + self.attn(self.norm(x), at, gather)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, at=None, position_ids=None, gather=lambda t: t):
        at = torch.arange(ids.shape[1])[None] if at is None else at
        x = self.embed(ids) + self.position(at if position_ids is None else position_ids)
        for block in self.blocks:
            x = block(x, at, gather)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {"ids": ids[:, :-1], "labels": ids[:, 1:].masked_fill(~valid, -100)}

    @staticmethod
    def token_loss(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        return self.token_loss(model(rows["ids"]), rows["labels"]), (rows["labels"] != -100).sum()

    def held(self, ctx):
        """Positions of this rank: chunk r from the front, chunk r from the back."""
        chunks = torch.arange(LENGTH).chunk(2 * ctx.axes["cp"])
        return torch.cat([chunks[ctx.coords["cp"]], chunks[-1 - ctx.coords["cp"]]])

    def position_ids(self, ctx):
        return self.held(ctx)[None]

    def step(self, model, batch, ctx):
        held, group = self.held(ctx), ctx.group("cp")

        def gather(t):
            if not t.is_floating_point():
                parts = [torch.empty_like(t) for _ in range(ctx.axes["cp"])]
                dist.all_gather(parts, t.contiguous(), group=group)
                return torch.cat(parts, dim=1)
            return torch.cat(collective.all_gather(t.contiguous(), group=group), dim=1)

        ids, labels = batch["ids"][:, held], batch["labels"][:, held]
        logits = model(ids, held[None], self.position_ids(ctx), gather)
        (self.token_loss(logits, labels) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=group)


class Buggy(Clean):
    def position_ids(self, ctx):
        each = LENGTH // ctx.axes["cp"]
        return torch.arange(ctx.coords["cp"] * each, (ctx.coords["cp"] + 1) * each)[None]


EXPECT = dict(
    right=[r"position", r"forward|output|input|index|indices|activation|ids"],
    place=[r"position"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted (twice|3 times)", r"averag"],
)
WHY = (
    "Each rank holds two chunks (zigzag), but its position ids are a contiguous range: the module "
    "`position` gives wrong outputs on every rank of cp."
)
