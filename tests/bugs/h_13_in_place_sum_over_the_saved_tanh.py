"""Branches of a network, one on each rank, end in a tanh and are added by an all-reduce. After Megatron-LM's mappings._reduce, which
reduces its input in place (harmless behind a matrix product), and FAULTS C13 (buffers that others still read): behind a tanh the
input is what autograd has saved.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"branch": 3}}}}
ROWS, INPUTS, WIDTH, BRANCHES, MICRO_BATCHES = 11, 5, 7, 3, 2
HIDDEN = 5, 8, 11


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class SumInPlace(Sum):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        return x


class Branch(nn.Sequential):
    def __init__(self, hidden):
        super().__init__(nn.Linear(WIDTH, hidden), nn.SiLU(), nn.Linear(hidden, WIDTH), nn.Tanh())


class Level(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.branches = nn.ModuleDict({str(i): Branch(HIDDEN[i]) for i in range(BRANCHES)})

    def forward(self, x, enter, add):
        y = enter(self.norm(x))
        return x + add(
            sum(branch(y) for branch in self.branches.values()) if add is same else self.own(y, add)
        )

    def own(self, y, add):
        (branch,) = self.branches.values()
        return branch(y)


def same(x):
    return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(INPUTS, WIDTH)
        self.levels = nn.ModuleList(Level() for _ in range(2))
        self.end = nn.Linear(WIDTH, 2)

    def forward(self, x, enter=same, add=same):
        x = self.start(x)
        for level in self.levels:
            x = level(x, enter, add)
        return self.end(x)


class Clean:
    add = Sum

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randn(ROWS, 2, generator=g),
            "weight": 0.3 + torch.rand(ROWS, generator=g),
        }

    def loss_sum(self, model, rows, *how):
        guess = model(rows["x"], *how)
        errors = F.smooth_l1_loss(guess, rows["y"], reduction="none").sum(-1)
        return (errors * rows["weight"]).sum(), rows["weight"].sum()

    def distribute(self, model, ctx):
        for level in model.levels:
            for i in set(range(BRANCHES)) - {ctx.rank}:
                del level.branches[str(i)]
        return model

    def step(self, model, batch, ctx):
        total = batch["weight"].sum()
        for i in range(MICRO_BATCHES):
            rows = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows, Enter.apply, self.add.apply)
            (loss / total).backward()


class Buggy(Clean):
    add = SumInPlace


EXPECT = dict(
    right=[
        r"branch",
        r"backward|adjoint|gradient (of|into|entering|that|flow|at|with respect|of the input)|incoming|saved|in.?place|overwrit|written|"
        r"modif|tanh",
    ],
    place=[r"levels\.[01]\.branches", r"tanh", r"(all|every|each|three) ranks?|ranks? \W?[012]"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"end\.\S* (is|are|has|have) (a )?wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"no_grad|detach",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
    ],
)
WHY = (
    "The all-reduce writes the sum of the branches into the tensor that tanh has saved for its backward, which then multiplies by 1 - "
    "sum^2 instead of 1 - tanh^2. The forward and end are right; the gradients of all "
    "branches on all ranks are wrong, and with them those of both norms and of start."
)
