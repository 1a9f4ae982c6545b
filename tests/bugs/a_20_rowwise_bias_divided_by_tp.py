"""Row-parallel linear layers that add a share of the bias before the sum over ranks. After
FAULTS C06-03 (torchtitan PR 4332).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}

ROWS, INPUTS, WIDTH, HIDDEN, CLASSES = 7, 6, 8, 9, 5


class CopyIn(torch.autograd.Function):
    """Identity forward, SUM over the tensor parallel ranks backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOut(torch.autograd.Function):
    """SUM over the tensor parallel ranks forward, identity backward."""

    @staticmethod
    def forward(ctx, x, group):
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def copy_in(x, group):
    return x if group is None else CopyIn.apply(x, group)


def sum_out(x, group):
    return x if group is None else SumOut.apply(x, group)


def cut(param, dim, ctx):
    """This rank's part of a weight."""
    return nn.Parameter(param.detach().chunk(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone())


class RowwiseLinear(nn.Linear):
    group, differentiable = None, False

    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        share = self.bias / dist.get_world_size(self.group)
        if not self.differentiable:
            share = self.bias + (share - self.bias).detach()
        return sum_out(F.linear(x, self.weight, share), self.group)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN), RowwiseLinear(HIDDEN, WIDTH)
        self.group = None

    def forward(self, x):
        return self.w2(F.silu(self.w1(copy_in(x, self.group))))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ffn_norm, self.feed_forward = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x):
        return x + self.feed_forward(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class Clean:
    differentiable = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["x"])

    def distribute(self, model, ctx):
        for layer in model.layers:
            ff = layer.feed_forward
            ff.group = ff.w2.group = ctx.group("tp")
            ff.w2.differentiable = self.differentiable
            ff.w1.weight, ff.w1.bias = cut(ff.w1.weight, 0, ctx), cut(ff.w1.bias, 0, ctx)
            ff.w2.weight = cut(ff.w2.weight, 1, ctx)
        return model

    def step(self, model, batch, ctx):
        loss, count = self.loss_sum(model, batch)
        (loss / count).backward()


class Buggy(Clean):
    differentiable = True


EXPECT = dict(
    right=[r"w2\.bias|w2|bias", r"0\.333|1/3|a third|one third|size of tp|1 / ?tp"],
    place=[r"w2\.bias|feed_forward\.w2|bias"],
    wrong=[
        r"forward .{0,20}(is )?wrong",
        r"mean of (the )?means",
        (
            r"counted (twice|two times|2 times)|reduced (twice|again)|repeated (reduc"
            r"|all.?reduce)"
        ),
    ],
)

WHY = (
    "bias / tp is differentiated, so the replicated bias of each row-parallel layer gets a "
    "third of its gradient."
)
