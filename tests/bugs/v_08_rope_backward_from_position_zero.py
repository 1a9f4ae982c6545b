"""Context parallel attention on three ranks with shards of unlike length: keys and values are gathered along the sequence, rotary positions by one fused autograd.Function which gets the first position
of the shard. After fused RoPE kernels with context parallelism (TransformerEngine, apex) and the offset in forward and backward.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 3}}}}
ROWS, LENGTH, HEADS, KV, SIZE, VOCABULARY = 5, 11, 4, 2, 4, 15
WIDTH = HEADS * SIZE


def rotate(x, start, sign):
    """x: (rows, positions, heads, SIZE)"""
    half = SIZE // 2
    place = torch.arange(start, start + x.shape[1], dtype=x.dtype)
    angle = place[:, None] * 20.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos()[:, None], sign * angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, start):
        ctx.start = start
        return rotate(x, start, 1)

    @staticmethod
    def backward(ctx, grad):
        return rotate(grad, ctx.start, -1), None


class FusedRopeNoOffset(FusedRope):
    @staticmethod
    def backward(ctx, grad):
        return rotate(grad, 0, -1), None


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.sizes, ctx.group = sizes, group
        padded = x.new_zeros(x.shape[0], max(sizes), *x.shape[2:])
        padded[:, : x.shape[1]] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:, :n] for part, n in zip(parts, sizes, strict=True)], 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone().contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.sizes, 1)[dist.get_rank(ctx.group)], None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV * SIZE, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 19), nn.Linear(19, WIDTH)

    def forward(self, x, start, rope, gather):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, SIZE)) for w in (self.q, self.k, self.v))
        q, k, v = rope(q, start), gather(rope(k, start)), gather(v)
        k, v = (y.repeat_interleave(HEADS // KV, 2) for y in (k, v))
        later = torch.arange(k.shape[1]) > torch.arange(start, start + x.shape[1])[:, None]
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * SIZE**-0.5
        p = scores.masked_fill(later, float("-inf")).softmax(-1)
        x = x + self.out(torch.einsum("bhij,bjhd->bihd", p, v).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            for block in self.blocks:
                block.q.weight.mul_(3)
                block.k.weight.mul_(3)

    def forward(self, ids, start, rope, gather):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, start, rope, gather)
        return self.head(self.norm(x))


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    rope = FusedRope

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(5, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], 0, lambda x, start: rotate(x, start, 1), lambda x: x)
        return token_loss(logits, rows["labels"]), (rows["labels"] != -100).sum()

    def step(self, model, batch, ctx):
        group, n, i = ctx.group("cp"), ctx.axes["cp"], ctx.coords["cp"]
        sizes = [len(part) for part in torch.arange(LENGTH).tensor_split(n)]
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        mine = {k: v.tensor_split(n, 1)[i] for k, v in rows.items()}
        logits = model(
            mine["ids"],
            sum(sizes[:i]),
            self.rope.apply,
            lambda x: GatherSequence.apply(x, sizes, group),
        )
        (token_loss(logits, mine["labels"]) / (batch["labels"] != -100).sum()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    rope = FusedRopeNoOffset


EXPECT = dict(
    right=[r"backward|gradient", r"rope|rotary|rotat|blocks\.1\.[qk]\b|position"],
    place=[r"rope|rotary|rotat|blocks\.1\.[qk]\b|blocks\.1\b"],
    wrong=[
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"(own|local) (count|denominator|divisor)",
        r"forward (is|goes|was) wrong|goes wrong in the forward",
        r"backward of \S*(GatherSequence|\.v\b|out|up|down|norm|head|embed)\S* is wrong",
        r"do(es)? not read every row once|rows? .{0,20}(never|twice) read|gradient of other targets",
    ],
)
WHY = (
    "The fused rotary function turns by the positions of the shard in the forward, but its backward turns back by positions that start at zero. On the first context rank (start 0) both are the same and right; on context ranks 1 and 2 (start 4 and 8), "
    "of both data ranks, the gradients of queries and keys before the rotation are turned by a wrong angle. q and k of blocks.1 are wrong first, v, out, MLP and head of blocks.1 are right; below, norm1 of blocks.1, all of blocks.0 and embed are wrong. "
    "Forward, gather and its backward, divisor and reductions are right."
)
