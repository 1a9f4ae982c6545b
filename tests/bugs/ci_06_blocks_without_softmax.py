"""A masked-patch encoder with sigmoid attention (no softmax; each head's scores get the offset
-log n, n the number of keys), cut along the patches over three ranks (4, 3, 3 of 10); the keys
and values go round a ring and each block's result is added.

Bug: the block kernel takes n from the keys it is given, which is the length of the block and
not of the whole sequence. After Apple's sigmoid attention (bias -log n by the sequence length)
when put in a ring / blockwise loop.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
PATCHES, PIXELS, WIDTH, HEADS, ROWS = 10, 5, 6, 2, 4


class Pass(torch.autograd.Function):
    """Sends to the next of the ring; the gradient goes the other way."""

    @staticmethod
    def swap(x, group, hop):
        ranks = dist.get_process_group_ranks(group)
        me = dist.get_rank(group)
        x = x.contiguous()
        out = torch.empty_like(x)
        ops = [
            dist.P2POp(dist.isend, x, ranks[(me + hop) % len(ranks)], group),
            dist.P2POp(dist.irecv, out, ranks[(me - hop) % len(ranks)], group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return Pass.swap(x, group, 1)

    @staticmethod
    def backward(ctx, g):
        return Pass.swap(g, ctx.group, -1), None


class SigmoidAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.linspace(0.5, 1.0, HEADS).view(HEADS, 1, 1))

    def block(self, q, k, v, keys):
        scores = q @ k.transpose(-1, -2) * self.temperature - math.log(keys)
        return torch.sigmoid(scores) @ v

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.split(x)
        return self.out(self.block(q, k, v, k.shape[-2]).transpose(1, 2).flatten(2))


class RingSigmoidAttention(SigmoidAttention):
    group = sizes = None

    def offset_keys(self, k):
        return sum(self.sizes)

    def forward(self, x):
        q, k, v = self.split(x)
        me, n = dist.get_rank(self.group), len(self.sizes)
        kv = torch.stack([k, v])
        kv = torch.cat(
            [kv, kv.new_zeros(*kv.shape[:3], max(self.sizes) - kv.shape[3], kv.shape[4])], 3
        )
        total = torch.zeros_like(q)
        for hop in range(n):
            k, v = kv[:, :, :, : self.sizes[(me - hop) % n]]
            total = total + self.block(q, k, v, self.offset_keys(k))
            if hop < n - 1:
                kv = Pass.apply(kv, self.group)
        return self.out(total.transpose(1, 2).flatten(2))


class OwnRingSigmoidAttention(RingSigmoidAttention):
    def offset_keys(self, k):
        return k.shape[-2]


class PatchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PIXELS, WIDTH)
        self.place = nn.Parameter(0.5 * torch.randn(PATCHES, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.ModuleList(SigmoidAttention() for _ in range(2))
        self.decode = nn.Linear(WIDTH, PIXELS)

    def forward(self, patches, hidden, place=slice(None)):
        x = self.embed(patches * (1 - hidden)) + self.place[place]
        for norm, attention in zip(self.norms, self.attention, strict=True):
            x = x + attention(norm(x))
        return ((self.decode(x) - patches).square() * hidden).sum()


class Clean:
    ring = RingSigmoidAttention

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 61)
        return PatchEncoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 600)
        patches = torch.randn(ROWS, PATCHES, PIXELS, generator=g)
        hidden = (torch.rand(ROWS, PATCHES, 1, generator=g) < 0.5).to(patches)
        hidden[:, 0] = 1
        return {"patches": patches, "hidden": hidden}

    def loss_sum(self, model, rows):
        return model(rows["patches"], rows["hidden"]), int(rows["hidden"].sum())

    def distribute(self, model, ctx):
        group = ctx.group("cp")
        sizes = [len(p) for p in torch.arange(PATCHES).tensor_split(dist.get_world_size(group))]
        for attention in model.attention:
            attention.__class__ = self.ring
            attention.group, attention.sizes = group, sizes
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("cp")
        own = torch.arange(PATCHES).tensor_split(dist.get_world_size(group))[dist.get_rank(group)]
        total = int(batch["hidden"].sum())
        for lo in range(0, ROWS, 3):
            loss = model(batch["patches"][lo : lo + 3, own], batch["hidden"][lo : lo + 3, own], own)
            (loss / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    ring = OwnRingSigmoidAttention


EXPECT = dict(
    right=[
        "log|offset|bias|shift",
        "local|own|block|shard|chunk|part",
        r"length|number of keys|size|count|keys|\bn\b|k\.shape",
    ],
    place=[
        "offset_keys",
        "OwnRingSigmoidAttention|RingSigmoidAttention",
        r"-?\s?(math\.)?log\(",
        "sigmoid",
    ],
    wrong=[
        r"log.?sum.?exp|\blse\b|online softmax|softmax (normali|denominator)",
        "one hop (short|too)",
        r"padd\w+ keys",
        r"position\w* (restart|start|from) ",
        r"(missing|not) (\w+ ){0,2}all.?reduc",
        "temperature (is )?not (reduced|summed)",
    ],
)
WHY = (
    "Sigmoid attention shifts all scores by -log n, n the number of all keys, and blocks of "
    "keys may then simply be added. OwnRingSigmoidAttention.offset_keys takes n from the "
    "block at hand (4 or 3 keys) where the whole sequence has 10, so each weight is sigmoid(s "
    "- log 4 or 3), some three times too large. The forward of both attention layers is wrong "
    "and with it practically all gradients (qkv, temperature, out, embed, place, norms, "
    "decode), equally on all ranks. A right cause says that the offset -log(n) is computed "
    "from the block's (local) key length and not the full length. Fix: pass the sum of all "
    "ranks' sizes."
)
