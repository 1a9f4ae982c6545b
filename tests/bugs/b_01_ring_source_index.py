"""Ring attention over the context axis: blocks travel, the mask is made from their origin.
After ring-attention reports on wrong causal blocks (class C19 of FAULTS, ring-flash-attention)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, WIDTH, VOCAB = 5, 9, 12, 17


def shift(x, group, by):
    """Pass x on along the ring; what the rank on the other side passed comes back."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to = dist.get_global_rank(group, (rank + by) % size)
    source = dist.get_global_rank(group, (rank - by) % size)
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype)
    works = [dist.isend(x, to, group=group), dist.irecv(out, source, group=group)]
    for work in works:
        work.wait()
    return out


class Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return shift(x, group, 1)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, ctx.group, -1), None


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Ring:
    def __init__(self, group):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def origin(self, step):
        """Whose block is here after so many turns; every turn brings that of the rank before."""
        return (self.rank - step) % self.size


class WrongRing(Ring):
    def origin(self, step):
        return (self.rank + step) % self.size


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, ring=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        long = torch.arange(x.shape[1])
        rank, size = (ring.rank, ring.size) if ring else (0, 1)
        scores, values, kv = [], [], torch.stack([k, v])
        for step in range(size):
            origin = ring.origin(step) if ring else 0
            hidden = origin * len(long) + long > rank * len(long) + long[:, None]
            block = 2 * q @ kv[0].transpose(1, 2) / WIDTH**0.5
            scores.append(block.masked_fill(hidden, float("-inf")))
            values.append(kv[1])
            if step + 1 < size:
                kv = Shift.apply(kv, ring.group)
        return self.out(torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x, ring=None):
        x = x + self.attn(self.norm1(x), ring)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, start=0, ring=None):
        x = self.embed(ids) + self.position(start + torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, ring)
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

    def ring(self, ctx):
        return Ring(ctx.group("cp"))

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.axes["cp"], dim=1)[ctx.coords["cp"]] for k, v in batch.items()}
        start = ctx.coords["cp"] * mine["ids"].shape[1]
        logits = model(mine["ids"], start, self.ring(ctx))
        (self.token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def ring(self, ctx):
        return WrongRing(ctx.group("cp"))


EXPECT = dict(
    right=[r"forward|output|activation", r"attn|attention"],
    place=[r"blocks\.0\.attn", r"rank 1\b", r"cp ?= ?1"],
    wrong=[r"never reduced|not reduced|missing reduction", r"counted (twice|3 times)", r"averag"],
)
WHY = (
    "The ring passes blocks on by +1, but the mask takes block (rank + step) instead of "
    "(rank - step): on rank 1 past and future blocks are exchanged in every attention."
)
