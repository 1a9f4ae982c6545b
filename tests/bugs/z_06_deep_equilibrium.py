"""A deep equilibrium model (Bai, Kolter, Koltun 2019; the hook of the NeurIPS 2020 tutorial "Deep implicit layers") for regression, its cell split by Megatron's tensor parallelism (up column-wise, down row-wise) over two ranks, times two data-parallel ranks.
z* = f(z*, x) is found by iteration; the backward solves g = grad + J^T g by iteration in a hook on z*.

J^T g is a sum over the tensor-parallel ranks, since each sees only its part of the inner units. The bug: the all-reduce of the vector-Jacobian product is moved out of the loop, "one instead of sixty". Plausible as an optimisation: in an ordinary layer the input gradient is reduced once, at the end.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
FEATURES, WIDTH, INNER, OUTPUTS, ROWS, ITERATIONS = 6, 8, 14, 3, 9, 80


class SumForward(torch.autograd.Function):
    """Megatron's g: sum in the forward, identity in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


def total(x, group):
    if group is not None:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
    return x


def solve(grad, pull_back, group):
    """g = grad + J^T g; `pull_back` is this rank's part of J^T."""
    g = grad
    for _ in range(ITERATIONS):
        g = grad + total(pull_back(g), group)
    return g


def solve_then_sum(grad, pull_back, group):
    g = grad
    for _ in range(ITERATIONS):
        g = grad + pull_back(g)
    return grad + total(g - grad, group)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        with torch.no_grad():
            self.up.weight.mul_(1.1)  # still a contraction
            self.down.weight.mul_(1.1)
        self.group = None

    def forward(self, z, x):
        inner = torch.tanh(F.linear(z, local(self.up.weight), local(self.up.bias)))
        out = F.linear(inner, local(self.down.weight))
        if self.group is not None:
            out = SumForward.apply(out, self.group)
        return torch.tanh(out + self.down.bias + x)


class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.cell = nn.Linear(FEATURES, WIDTH), Cell()
        self.leave = nn.Linear(WIDTH, OUTPUTS)
        self.solve = solve

    def forward(self, features):
        x = self.enter(features)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(ITERATIONS):
                z = self.cell(z, x)
        fixed = z.clone().requires_grad_()
        around = self.cell(fixed, x.detach())

        def pull_back(g):
            return torch.autograd.grad(around, fixed, g, retain_graph=True)[0]

        z = self.cell(z, x)
        if z.requires_grad:
            z.register_hook(lambda grad: self.solve(grad, pull_back, self.cell.group))
        return self.leave(z)


class Clean:
    solve = staticmethod(solve)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Equilibrium()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "features": torch.randn(ROWS, FEATURES, generator=g),
            "target": torch.randn(ROWS, OUTPUTS, generator=g),
        }

    def loss_sum(self, model, rows):
        return ((model(rows["features"]) - rows["target"]) ** 2).sum(), len(rows["target"])

    def distribute(self, model, ctx):
        for layer, name, placement in (
            (model.cell.up, "weight", Shard(0)),
            (model.cell.up, "bias", Shard(0)),
            (model.cell.down, "weight", Shard(1)),
        ):
            whole = getattr(layer, name).data
            part = distribute_tensor(whole, ctx.mesh, [Replicate(), placement])
            setattr(layer, name, nn.Parameter(part))
        model.cell.group, model.solve = ctx.group("tp"), self.solve
        return model

    def step(self, model, batch, ctx):
        dp = ctx.mesh.get_local_rank("dp")
        mine = {k: v.tensor_split(2)[dp] for k, v in batch.items()}
        (self.loss_sum(model, mine)[0] / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(local(p.grad), group=ctx.group("dp"))


class Buggy(Clean):
    solve = staticmethod(solve_then_sum)


EXPECT = dict(
    right=[
        r"(?i)backward|gradient|hook|adjoint|implicit|jacobian|solve|vjp|fixed.?point|equilibri",
        r"(?i)tp\b|tensor.?parallel|shard|reduc|sum|partial|own (part|half|units|share)|iterat|solve|hook|equilibri|local|jacobian|cell",
    ],
    place=[r"(?i)cell|hook|solve|iterat|equilibri|fixed|implicit|z\b|backward of|enter"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|loss is wrong",
        r"(?i)leave\.?\S* (is|are) wrong",
        r"(?i)reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)over (the )?(data.?parallel|dp)( ranks)? .{0,20}(missing|never)|missing .{0,30}over (the )?(data.?parallel|dp)",
        r"(?i)rows? .{0,20}(never read|read twice|lost|missing)",
    ],
)
WHY = (
    "The hook's fixed-point iteration g = grad + J^T g needs J^T g summed over the two tensor-parallel ranks in EVERY iteration. Here each rank iterates with its own part J_r^T alone (its 7 of the 14 inner units) and the results are summed once at the end: g = grad + sum_r ((I - J_r^T)^-1 - I) grad instead of (I - sum_r J_r^T)^-1 grad. "
    "All products of Jacobians of different ranks (from the second order on) are missing. Forward, z*, loss and `leave` are right; the gradient at the equilibrium is wrong in direction for all rows and the same on both tp ranks, so cell.up.weight, cell.up.bias, cell.down.weight, cell.down.bias, enter.weight and enter.bias are wrong on all four ranks (3 to 5 percent of the largest element with seed 0, <d, r> / <r, r> 0.96 to 0.99). "
    "The reduction over dp, the divisor 9 and the rows are right. Fix: all-reduce the vector-Jacobian product inside the loop."
)
