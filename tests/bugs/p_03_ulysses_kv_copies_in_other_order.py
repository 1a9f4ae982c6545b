"""Ulysses: sequence shards are turned into head shards by all-to-all before attention and back after it; grouped-query attention with fewer
key/value heads than ranks, so these are copied up to the query heads before the all-to-all. After reports on GQA under Ulysses
(repeat_kv): the copies are made as h0 h1 h0 h1 ... instead of h0 h0 ... h1 h1.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS, KV, DIM = 5, 9, 21, 14, 6, 2, 4


class AllToAll(torch.autograd.Function):
    """(rows, heads, length / n, dim) -> (rows, heads / n, length, dim), or the way back."""

    @staticmethod
    def forward(ctx, x, split, join, group):
        ctx.rest = split, join, group
        n = dist.get_world_size(group)
        send = torch.stack(x.chunk(n, split)).contiguous()
        got = torch.empty_like(send)
        dist.all_to_all_single(got, send, group=group)
        return torch.cat(list(got), join)

    @staticmethod
    def backward(ctx, grad):
        split, join, group = ctx.rest
        return AllToAll.apply(grad, join, split, group), None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV) * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 17, bias=False), nn.Linear(WIDTH, 17, bias=False)
        self.down = nn.Linear(17, WIDTH, bias=False)

    def forward(self, x, attend):
        h = self.qkv(self.norm(x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        y = attend(*h.split((HEADS, KV, KV), 1))
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, places, attend):
        x = self.embed(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def grouped(q, k, v):
    k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH), grouped)
        return token_loss(logits, rows["labels"]), rows["labels"].numel()

    def copies(self, t):
        """(rows, kv, length, dim) -> (rows, heads, length, dim)"""
        return t[:, :, None].expand(-1, -1, HEADS // KV, -1, -1).flatten(1, 2)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["cp"], ctx.coords["cp"], ctx.group("cp")
        own = torch.arange(LENGTH).chunk(n)[me]

        def attend(q, k, v):
            q, k, v = (AllToAll.apply(t, 1, 2, group) for t in (q, self.copies(k), self.copies(v)))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return AllToAll.apply(y, 2, 1, group)

        for rows in torch.arange(ROWS).tensor_split(2):
            ids, labels = (batch[name][rows][:, own] for name in ("ids", "labels"))
            loss = token_loss(model(ids, own, attend), labels)
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def copies(self, t):
        return t[:, None].expand(-1, HEADS // KV, -1, -1, -1).flatten(1, 2)


EXPECT = dict(
    right=[
        r"forward|activation|goes into|input of|what goes in",
        r"blocks\.0\.(qkv|o)|attend|attention|head|all.?to.?all",
    ],
    place=[r"blocks\.0\.(qkv|o)|attend|attention"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"blocks\.0\.qkv\S* (forward|output) .{0,20}wrong",
        r"(own|local) (count|denominator|divisor)",
        r"(causal|mask)\w* .{0,20}wrong|positions? .{0,20}shifted",
    ],
)
WHY = (
    "Before the all-to-all the two key/value heads are copied as h0 h1 h0 h1 h0 h1 instead of h0 h0 h0 h1 h1 h1, so query heads 1 and 4 of 0..5 "
    "attend to the other head's keys and values (0, 2, 3 and 5 to the right ones). "
    "blocks.0.qkv gives the right output, what goes into blocks.0.o is wrong at those heads on every rank, and from there the whole forward and "
    "all gradients. Reductions and the loss divisor are right."
)
