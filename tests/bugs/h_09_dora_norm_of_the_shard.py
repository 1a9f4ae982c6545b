"""DoRA adapters under tensor parallelism: each row of W + B A is divided by its length and multiplied by a learned magnitude. After the
reports on DoRA with sharded weights (peft, vLLM; FAULTS C05-11 and C19, a statistic of the shard): in the row-parallel
layer the length of a row is taken over the rank's columns.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, LENGTH, INPUTS, WIDTH, HIDDEN, RANK = 8, 5, 4, 8, 10, 2


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class OutOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def same(x):
    return x


def full_length(weight, total):
    return total(weight.square().sum(1)).sqrt()


def own_length(weight, total):
    return weight.norm(dim=1)


class Dora(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.b = nn.Parameter(0.5 * torch.randn(outputs, RANK))
        self.magnitude = nn.Parameter(0.5 + torch.rand(outputs))

    def forward(self, x, length=full_length, total=same):
        weight = self.weight + self.b @ self.a
        norm = length(weight.detach(), total)  # a constant of the backward, as in the paper
        return F.linear(x, weight) * (self.magnitude / norm)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            Dora(WIDTH, HIDDEN),
            Dora(HIDDEN, WIDTH),
        )

    def forward(self, x, into, out_of, length):
        x = x + out_of(self.down(F.gelu(self.up(into(self.norm(x)))), length, out_of))
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.end = nn.Linear(WIDTH, 1)

    def forward(self, x, into=same, out_of=same, length=full_length):
        x = self.start(x)
        for block in self.blocks:
            x = block(x, into, out_of, length)
        return self.end(x)[..., 0]


class Clean:
    length = staticmethod(full_length)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        steps = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "y": torch.randn(ROWS, LENGTH, generator=g),
            "there": torch.arange(LENGTH) < steps,
        }

    @staticmethod
    def price_loss(guess, rows):
        return ((guess - rows["y"]).square() * rows["there"]).sum()

    def loss_sum(self, model, rows):
        return self.price_loss(model(rows["x"]), rows), rows["there"].sum()

    def distribute(self, model, ctx):
        def cut(layer, name, dim):
            param = getattr(layer, name)
            part = param.detach().tensor_split(ctx.axes["tp"], dim)[ctx.coords["tp"]].clone()
            setattr(layer, name, nn.Parameter(part, requires_grad=param.requires_grad))

        for block in model.blocks:
            for name in ("weight", "b", "magnitude"):
                cut(block.up, name, 0)
            for name in ("weight", "a"):
                cut(block.down, name, 1)
        return model

    def step(self, model, batch, ctx):
        guess = model(batch["x"], Into.apply, OutOf.apply, self.length)
        (self.price_loss(guess, batch) / batch["there"].sum()).backward()
        for block in model.blocks:  # whole on every rank, used with a part of the hidden units
            for param in (block.up.a, block.down.b, block.down.magnitude):
                dist.all_reduce(param.grad)


class Buggy(Clean):
    length = staticmethod(own_length)


EXPECT = dict(
    right=[
        r"down|blocks\.0",
        r"forward|output|activation|norm of|length|statistic|values? (of|at|in)|shard",
    ],
    place=[r"blocks\.0\.down", r"down", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(start|blocks\.0\.(norm|up))\S* (is|was) wrong|first wrong .{0,20}(start|blocks\.0\.(norm|up))",
        r"mean of (the )?(rank |ranks' )?means",
    ],
)
WHY = (
    "In blocks.*.down the rows of W + B A are divided by the length of the rank's 4, 3 or 3 columns instead of the length of the whole "
    "row, so the outputs are too large, by another factor on each rank. The "
    "forward is wrong from blocks.0.down on, on all ranks, and with it the gradients of all parameters."
)
