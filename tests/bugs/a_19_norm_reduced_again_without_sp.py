"""Tensor parallelism without sequence parallelism; a finalize step reduces what is marked.
After FAULTS C06-08 and C06-01 (norm gradients tp times too large).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, INPUTS, WIDTH, HIDDEN, OUT = 9, 6, 8, 12, 4


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.group = None

    def forward(self, x):
        h = F.gelu(self.up(copy_in(self.norm(x), self.group)))
        return x + sum_out(self.down(h), self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    sequence_parallel = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randn(ROWS, OUT, generator=g),
            "weight": torch.rand(ROWS, 1, generator=g),
        }

    def loss_sum(self, model, rows):
        error = (model(rows["x"]) - rows["y"]).square() * rows["weight"]
        return error.sum(), rows["weight"].sum()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.group = ctx.group("tp")
            block.up.weight, block.up.bias = (
                cut(block.up.weight, 0, ctx),
                cut(block.up.bias, 0, ctx),
            )
            block.down.weight = cut(block.down.weight, 1, ctx)
        return model

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        loss, weight = self.loss_sum(model, mine)
        dist.all_reduce(weight, group=ctx.group("dp"))
        (loss / weight).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))
        self.finalize(model, ctx)

    def finalize(self, model, ctx):
        """Norms see a stretch of the sequence only where it is sharded."""
        if not self.sequence_parallel:
            return
        for name, param in model.named_parameters():
            if "norm" in name:
                dist.all_reduce(param.grad, group=ctx.group("tp"))


class Buggy(Clean):
    def finalize(self, model, ctx):
        for name, param in model.named_parameters():
            if "norm" in name:  # keep replicas in step
                dist.all_reduce(param.grad, group=ctx.group("tp"))


EXPECT = dict(
    right=[
        r"norm",
        (
            r"(times|factor|by|of|is|=|x) ?2(\.0+)?\b|\b2(\.0+)? ?(times|x\b)|twice|repeated"
            r"|already|complete|again|double"
        ),
    ],
    place=[r"norm"],
    wrong=[
        r"not reduced|never reduced|missing all.?reduce",
        r"mean of (the )?means",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The norms' gradients are complete on every tp rank without sequence parallelism and are "
    "all-reduced over tp again: twice too large."
)
