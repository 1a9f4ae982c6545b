"""A denoiser's residual block (U-Net middle) on small pictures: rows over dp (2), the hidden
channels over tp (2), whole groups of the group norm to a rank (2 and 1 of 3 groups), two
micro-batches. Norm and SiLU run in one fused function with its own backward, as the fused
GroupNorm + SiLU kernels of diffusion code bases do.

Bug: the backward takes the slope of SiLU at the normalised value, before weight and bias. After
fused norm-activation kernels tested with weight one and bias zero only.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
IN, HIDDEN, GROUPS, ROWS, EPS = 4, 9, 3, 7, 1e-5


class NormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, groups):
        grouped = x.reshape(x.shape[0], groups, -1)
        centred = grouped - grouped.mean(-1, keepdim=True)
        rstd = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
        normed = (centred * rstd).reshape(x.shape)
        ctx.save_for_backward(normed, rstd, weight, bias)
        ctx.groups = groups
        return F.silu(normed * weight[:, None, None] + bias[:, None, None])

    @staticmethod
    def slope(normed, weight, bias):
        a = normed * weight[:, None, None] + bias[:, None, None]
        s = torch.sigmoid(a)
        return s * (1 + a * (1 - s))

    @classmethod
    def pull(cls, ctx, g):
        normed, rstd, weight, bias = ctx.saved_tensors
        g = g * cls.slope(normed, weight, bias)
        grad_weight, grad_bias = (g * normed).sum((0, 2, 3)), g.sum((0, 2, 3))
        flat = (g.shape[0], ctx.groups, -1)
        g, n = (g * weight[:, None, None]).reshape(flat), normed.reshape(flat)
        grad = rstd * (g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True))
        return grad.reshape(normed.shape), grad_weight, grad_bias, None

    @staticmethod
    def backward(ctx, g):
        return NormSiLU.pull(ctx, g)


class NormSiLUPorted(NormSiLU):
    @staticmethod
    def slope(normed, weight, bias):
        s = torch.sigmoid(normed)
        return s * (1 + normed * (1 - s))

    @staticmethod
    def backward(ctx, g):
        return NormSiLUPorted.pull(ctx, g)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv2d(IN, HIDDEN, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, HIDDEN, eps=EPS)
        self.down = nn.Conv2d(HIDDEN, IN, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.zeros(IN))
        self.fused = self.group = None

    def forward(self, x):
        if self.fused is None:
            return x + self.down(F.silu(self.norm(self.up(x)))) + self.bias[:, None, None]
        h = self.up(Enter.apply(x, self.group))
        h = self.fused(h, self.norm.weight, self.norm.bias, self.norm.num_groups)
        return x + Leave.apply(self.down(h), self.group) + self.bias[:, None, None]


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(2, IN, 1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leave = nn.Conv2d(IN, 1, 1)

    def forward(self, noisy, level):
        level = level[:, None, None, None].expand_as(noisy)
        x = self.enter(torch.cat([noisy, level], 1))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Clean:
    kernel = NormSiLU

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        model = Denoiser()
        for block in model.blocks:
            nn.init.normal_(block.norm.weight, 1.0, 0.6)
            nn.init.normal_(block.norm.bias, 0.0, 0.8)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 110)
        return {
            "clean": torch.randn(ROWS, 1, 5, 6, generator=g),
            "noise": torch.randn(ROWS, 1, 5, 6, generator=g),
            "level": torch.rand(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        noisy = rows["clean"] + rows["level"][:, None, None, None] * rows["noise"]
        error = model(noisy, rows["level"]) - rows["noise"]
        return error.square().sum(), error.numel()

    def distribute(self, model, ctx):
        part = torch.arange(GROUPS).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        width = HIDDEN // GROUPS
        lo, n = int(part[0]) * width, len(part) * width

        def own(t, dim=0):
            return nn.Parameter(t.detach().narrow(dim, lo, n).clone())

        for block in model.blocks:
            block.up.weight, block.up.bias = own(block.up.weight), own(block.up.bias)
            block.norm.weight, block.norm.bias = own(block.norm.weight), own(block.norm.bias)
            block.norm.num_groups, block.norm.num_channels = len(part), n
            block.down.weight = own(block.down.weight, 1)
            block.fused, block.group = self.kernel.apply, ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.tensor_split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / batch["clean"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    kernel = NormSiLUPorted


EXPECT = dict(
    right=[
        r"silu|swish|sigmoid|activation|slope|derivative|NormSiLU|fused",
        r"backward|gradient|slope|derivative|adjoint",
        r"(before|without|ignor\w+|leav\w+ out|omit\w*|lack\w*|not).{0,60}"
        r"(affine|weight|bias|scale|shift)|normali[sz]ed (value|input)|pre-?affine|"
        r"(sigmoid|silu|slope|derivative)\w* .{0,40}(of|at|on) .{0,20}(normed|normali[sz]ed)",
    ],
    place=[
        r"NormSiLU(Ported)?",
        r"\bslope\b",
        r"\bfused\b|\bkernel\b",
        r"sigmoid\(normed\)",
        r"blocks\.\d\.norm",
    ],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(mean|variance|rstd|statistic).{0,40}(wrong|missing|own shard|detached)",
        r"group.{0,30}(cut|split) across",
        r"\beps\b.{0,30}(wrong|differ|miss)",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """y = silu(a) with a = normed * weight + bias. The backward of the fused function needs the
slope of SiLU at a; NormSiLUPorted.slope takes it at `normed`, which it has saved, so the affine
map is left out. The forward is right. Wrong are norm.weight, norm.bias, and what lies before them
(up, enter, earlier blocks); the last block's down and leave are right. Fix: recompute
a = normed * weight + bias in slope and take sigmoid(a), a."""
