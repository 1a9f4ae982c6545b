"""Attention with a learned relative bias in the style of xFormers' memory_efficient_attention (BMHK layout, hand-written forward and backward, the bias must have the full shape [batch, heads, queries, keys], so users `expand` it: xFormers issues
783, 854, 636 "gradients to attention bias"). Under DDP over three ranks, two micro-batches with no_sync. The backward allocates the bias gradient with the shape AND the strides of the bias: along an expanded dimension the stride is zero.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, LENGTH, WIDTH, HEADS, REACH, ROWS, MICRO = 21, 6, 12, 3, 4, 10, 2


class BiasedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, bias, room):
        scale = q.shape[-1] ** -0.5
        p = (torch.einsum("bmhk,bnhk->bhmn", q, k) * scale + bias).softmax(-1)
        ctx.save_for_backward(q, k, v, bias, p)
        ctx.scale, ctx.room = scale, room
        return torch.einsum("bhmn,bnhk->bmhk", p, v)

    @staticmethod
    def backward(ctx, g):
        q, k, v, bias, p = ctx.saved_tensors
        dq, dk, dv, dbias = (
            torch.empty_like(q),
            torch.empty_like(k),
            torch.empty_like(v),
            ctx.room(bias),
        )
        for b in range(len(q)):  # the kernel's grid: one program per batch element
            dp = torch.einsum("mhk,nhk->hmn", g[b], v[b])
            ds = p[b] * (dp - (dp * p[b]).sum(-1, keepdim=True))
            dv[b] = torch.einsum("hmn,mhk->nhk", p[b], g[b])
            dq[b] = torch.einsum("hmn,nhk->mhk", ds, k[b]) * ctx.scale
            dk[b] = torch.einsum("hmn,mhk->nhk", ds, q[b]) * ctx.scale
            dbias[b] = ds
        return dq, dk, dv, dbias, None


def room_of_own(bias):
    return torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)


def room_like(bias):
    return torch.empty_strided(bias.shape, bias.stride(), dtype=bias.dtype, device=bias.device)


class Block(nn.Module):
    room = staticmethod(room_of_own)

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.relative = nn.Embedding(2 * REACH + 1, HEADS)
        self.up, self.down = nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH)

    def forward(self, x):
        n = torch.arange(x.shape[1])
        bias = self.relative((n[None] - n[:, None]).clamp(-REACH, REACH) + REACH)
        bias = bias.permute(2, 0, 1)[None].expand(len(x), -1, -1, -1)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(BiasedAttention.apply(q, k, v, bias, self.room).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    room = staticmethod(room_of_own)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(
            model(rows["ids"]).flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        )
        return loss, rows["labels"].numel()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.room = self.room
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        scale = ctx.world_size / batch["labels"].numel()  # DDP takes the mean
        for m in range(MICRO):
            part = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            with nullcontext() if m == MICRO - 1 else model.no_sync():
                (self.loss_sum(model, part)[0] * scale).backward()


class Buggy(Clean):
    room = staticmethod(room_like)


EXPECT = dict(
    right=[
        r"(?i)relative|bias",
        r"(?i)backward|gradient|\bgrad\b",
        r"(?i)last|one row|single row|other rows|overwrit|stride|expand|batch element|rows?|only .{0,30}(sample|sequence|example)|broadcast|local|within",
    ],
    place=[r"(?i)relative|biasedattention|attention bias"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)|outside (of )?ddp|no_sync",
        r"(?i)(qkv|embed|head|norm2?|up|down|out)\.(weight|bias) (is|are) wrong",
        r"(?i)divi(ded|des) by|divisor",
        r"(?i)(first|second) micro.?batch .{0,25}(lost|missing|dropped)",
        r"(?i)double|factor (of )?[0-9./]+ (on|of|for) (all|every|the) (rank|param)",
    ],
)
WHY = (
    "The backward of BiasedAttention allocates the bias gradient with the strides of the expanded bias (stride 0 over the batch). All rows of the micro-batch write into the same memory, the last one remains; the backward of expand then sums B copies of it, so that the gradient of blocks.*.relative.weight is, per rank and micro-batch, "
    "(number of rows) x (contribution of the last row of this rank's micro-batch) instead of the sum over its rows. Ranks have 4, 3, 3 rows, micro-batches 2+2, 2+1, 2+1: with one row (second micro-batch of ranks 1 and 2) it is right. Both tables, on all ranks alike after DDP's mean. "
    "Not a plain factor. dq, dk, dv and with them every other parameter are right; so are forward, loss and DDP's reduction. Fix: allocate the gradient contiguous with the full shape (torch.empty(bias.shape)), or sum with atomics."
)
