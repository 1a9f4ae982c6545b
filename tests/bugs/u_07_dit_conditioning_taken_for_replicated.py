"""A diffusion transformer (DiT, adaptive layer norms) with its image tokens cut over two ranks and its images over two more; keys and values are gathered.
Velocity loss over all elements. The ranks of a sequence group see the same time step and class.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 2}}}}
ROWS, TOKENS, PATCH, WIDTH, HEADS, CLASSES = 5, 9, 6, 12, 3, 4


class GatherTokens(torch.autograd.Function):
    """(rows, own tokens, ...) to (rows, all tokens, ...); backward sums what all ranks want of the own tokens."""

    @staticmethod
    def forward(ctx, x, group, sizes, me):
        ctx.rest = group, sizes, me
        parts = [x.new_empty(len(x), s, *x.shape[2:]) for s in sizes]
        parts[me].copy_(x)
        for i, part in enumerate(parts):
            dist.broadcast(part, dist.get_global_rank(group, i), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        group, sizes, me = ctx.rest
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=group)
        return grad.split(sizes, 1)[me], None, None, None


class Conditioning(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(CLASSES, WIDTH)

    def forward(self, t, y):
        angle = t[:, None] * torch.exp(-math.log(100.0) * torch.arange(4, dtype=t.dtype) / 4)
        return self.time(torch.cat([angle.cos(), angle.sin()], -1)) + self.label(y)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, WIDTH))
        self.ada = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x, c, gather):
        s1, b1, g1, s2, b2, g2 = self.ada(F.silu(c))[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + s1) + b1
        q, k, v = self.qkv(h).chunk(3, -1)
        q, k, v = (a.unflatten(-1, (HEADS, -1)).transpose(1, 2) for a in (q, gather(k), gather(v)))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + g1 * self.proj(a)
        return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Linear(PATCH, WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.3)
        self.conditioning = Conditioning()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.ada, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, PATCH)

    def forward(self, x, t, y, where=slice(None), gather=lambda a: a):
        h = self.patches(x) + self.places[where]
        c = self.conditioning(t, y)
        for block in self.blocks:
            h = block(h, c, gather)
        scale, shift = self.ada(F.silu(c))[:, None].chunk(2, -1)
        return self.out(self.norm(h) * (1 + scale) + shift)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return DiT()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, PATCH, generator=g),
            "velocity": torch.randn(ROWS, TOKENS, PATCH, generator=g),
            "t": torch.rand(ROWS, generator=g) * 3,
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["x"], rows["t"], rows["y"])
        return (out - rows["velocity"]).square().sum(), rows["velocity"].numel()

    def step(self, model, batch, ctx):
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        n, me, group = ctx.axes["sp"], ctx.coords["sp"], ctx.group("sp")
        parts = torch.arange(TOKENS).tensor_split(n)
        sizes, mine = [len(p) for p in parts], slice(int(parts[me][0]), int(parts[me][-1]) + 1)
        out = model(
            rows["x"][:, mine],
            rows["t"],
            rows["y"],
            mine,
            lambda a: GatherTokens.apply(a, group, sizes, me),
        )
        loss = (out - rows["velocity"][:, mine]).square().sum()
        (loss / batch["velocity"].numel()).backward()
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=self.group_of(name, ctx))

    def group_of(self, name, ctx):
        return ctx.group("dp", "sp")


class Buggy(Clean):
    def group_of(self, name, ctx):
        """Time step and class are the same on all ranks of a sequence: so are the gradients of what they go through."""
        if name.startswith("conditioning.") or ".ada." in name or name.startswith("ada."):
            return ctx.group("dp")
        return ctx.group("dp", "sp")


EXPECT = dict(
    right=[
        r"reduc|\bsum|group|own (tokens|part)",
        r"\bsp\b|sequence|tokens|too few|over dp|missing|subset|half",
    ],
    place=[r"\bada\b|conditioning"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in",
        r"(counted|reduced|summed|added) (twice|again)",
        r"(qkv|proj|mlp|patches|places|\bout\b)\S* (is|are) (wrong|not reduced|never)",
        r"(own|local) (count|denominator|divisor)",
        r"missing .{0,20}over dp|not reduced over dp",
        r"backward of .{0,30}(is|goes) wrong|all parameters are wrong",
    ],
)
WHY = (
    "The parameters of the conditioning path (conditioning.*, blocks.*.ada, ada) are reduced over dp only, because their input, time step and class, is the same on both ranks of a sequence "
    "group. But scale, shift and gate are applied to a rank's own tokens, so the gradients that come back are partial: of tokens 0-4 on sp 0 and 5-8 on sp 1. After the step each rank has the sum "
    "over dp of its own sp coordinate's part, the sum over sp is missing, and the ranks of a sequence group differ. All four ranks are wrong there; all other parameters, forward and backward are right. "
    "They must be summed over dp and sp."
)
