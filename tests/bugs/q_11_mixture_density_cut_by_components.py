"""A mixture density network whose components are cut over two ranks, with data parallelism of two and two micro-batches; the log-sum-exps
over the components are computed over both ranks. After hand-written distributed softmaxes: the sums that are added up are each relative to
the own maximum, the result to the common one.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "comp": 2}}}}
ROWS, INPUTS, OUTPUTS, WIDTH, COMPONENTS, MICRO = 9, 5, 2, 10, 5, 2


class Copy(torch.autograd.Function):
    """To all components; what comes back from them is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class LogSumExp(torch.autograd.Function):
    """Over the last axis, which is cut over the group; every rank gets the whole."""

    @staticmethod
    def forward(ctx, x, group, common):
        own = x.amax(-1, keepdim=True)
        top = own.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        total = (x - (top if common else own)).exp().sum(-1, keepdim=True)
        dist.all_reduce(total, group=group)
        out = top + total.log()
        ctx.save_for_backward((x - out).exp())
        return out[..., 0]

    @staticmethod
    def backward(ctx, grad):
        (share,) = ctx.saved_tensors
        return grad[..., None] * share, None, None


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.choice = nn.Linear(WIDTH, COMPONENTS)
        self.spread = nn.Linear(WIDTH, COMPONENTS)
        self.mean = nn.Linear(WIDTH, COMPONENTS * OUTPUTS)

    def forward(self, x, y, copy, logsumexp):
        """log p(y | x)"""
        h = copy(self.trunk(x))
        choice, spread = self.choice(h) * 4, self.spread(h)
        mean = self.mean(h).unflatten(-1, (-1, OUTPUTS)) * 2
        z = (y[:, None] - mean) / spread.exp()[..., None]
        each = -0.5 * z.square().sum(-1) - OUTPUTS * (spread + 0.5 * math.log(2 * math.pi))
        return logsumexp(choice + each) - logsumexp(choice)


class Clean:
    common = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Mixture()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g) * 1.5,
            "y": torch.randn(ROWS, OUTPUTS, generator=g),
        }

    def loss_sum(self, model, rows):
        logp = model(rows["x"], rows["y"], lambda h: h, lambda x: x.logsumexp(-1))
        return -logp.sum(), len(rows["x"])

    def distribute(self, model, ctx):
        n, me = ctx.axes["comp"], ctx.coords["comp"]
        for name, each in (("choice", 1), ("spread", 1), ("mean", OUTPUTS)):
            whole = getattr(model, name)
            at = torch.arange(COMPONENTS).tensor_split(n)[me]
            rows = (at[:, None] * each + torch.arange(each)).flatten()
            part = nn.Linear(WIDTH, len(rows), dtype=whole.weight.dtype)
            part.weight = nn.Parameter(whole.weight.detach()[rows].clone())
            part.bias = nn.Parameter(whole.bias.detach()[rows].clone())
            setattr(model, name, part)
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("comp")
        at = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for i in at.tensor_split(MICRO):
            logp = model(
                batch["x"][i],
                batch["y"][i],
                lambda h: Copy.apply(h, group),
                lambda x: LogSumExp.apply(x, group, self.common),
            )
            (-logp.sum() / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    common = False


EXPECT = dict(
    right=[
        r"loss|forward|gradient that reaches|backward|logsumexp",
        r"choice|spread|mean|loss|logsumexp|mixture",
    ],
    place=[r"choice|spread|mean|loss|logsumexp|mixture"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}goes wrong in (the )?(trunk|choice|spread|mean)",
        r"own (count|denominator|divisor)",
        r"rows? .{0,20}(read|seen) (twice|never)",
        r"(only|alone) .{0,10}(choice|spread|mean)\S* (is|are) wrong",
    ],
)
WHY = (
    "LogSumExp adds up sums of exp(x - own maximum) of both component ranks but then adds the common maximum: the part of the rank whose "
    "maximum is lower counts too much, the result is too large, and the shares in the backward no longer add up to 1. What `choice`, `spread` "
    "and `mean` give is right; the gradients that reach them are wrong on all ranks, and with them all gradients. Reductions and divisor "
    "are right."
)
