"""Regression with a full covariance under DDP on three ranks (2, 3 and 1 micro-batches of odd size, no_sync before the last): a trunk, a head for the mean of three targets and a head for a matrix A with covariance A A' + 0.3. The loss
is the negative log density through a Cholesky factor, which is an autograd Function with its own backward. Divisor: rows of all ranks.

The bug: in the backward the matrix L' dL is cut to its lower triangle with its whole diagonal; the diagonal must be halved (the operator Phi in Murray, Differentiation of the Cholesky decomposition). After pytorch/pytorch issues 18825
(Wrong derivative backpropagating through Cholesky factorization?) and 137284.
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
INPUTS, TARGETS, WIDTH, ROWS = 5, 3, 8, 13
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 8), (8, 9)], [(9, 13)]]


class Factor(torch.autograd.Function):
    @staticmethod
    def forward(ctx, covariance, half):
        lower = torch.linalg.cholesky(covariance)
        ctx.save_for_backward(lower)
        ctx.half = half
        return lower

    @staticmethod
    def backward(ctx, grad):
        (lower,) = ctx.saved_tensors
        inner = (lower.mT @ grad).tril()
        if ctx.half:
            inner = inner - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
        left = torch.linalg.solve_triangular(lower.mT, inner, upper=True)
        full = torch.linalg.solve_triangular(lower, left, upper=False, left=False)
        return 0.5 * (full + full.mT), None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.half = True
        self.trunk = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.SiLU())
        self.mean = nn.Linear(WIDTH, TARGETS)
        self.spread = nn.Linear(WIDTH, TARGETS * TARGETS)

    def forward(self, x):
        h = self.trunk(x)
        a = self.spread(h).unflatten(-1, (TARGETS, TARGETS))
        noise = 0.3 * torch.eye(TARGETS, dtype=a.dtype)
        return self.mean(h), Factor.apply(a @ a.mT + noise, self.half)


def density_loss(model, rows):
    mean, lower = model(rows["x"])
    rest = (rows["y"] - mean)[..., None]
    z = torch.linalg.solve_triangular(lower, rest, upper=False)
    return 0.5 * z.square().sum() + lower.diagonal(dim1=-2, dim2=-1).log().sum()


class Clean:
    half = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randn(ROWS, TARGETS, generator=g),
        }

    def loss_sum(self, model, rows):
        return density_loss(model, rows), len(rows["y"])

    def distribute(self, model, ctx):
        model.half = self.half
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (density_loss(model, rows) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    half = False


EXPECT = dict(
    right=[
        r"(?i)spread|Factor|cholesky",
        r"(?i)backward|gradient (of|that|into|at)|adjoint|hands? (back|on)",
    ],
    place=[r"(?i)spread|Factor|cholesky"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\bmean(\.(weight|bias))? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|recomput|dropout|detach",
    ],
)
WHY = (
    "Forward, loss, mean head are right. The backward of Factor is wrong on all ranks, rows and micro-batches: the lower triangle of L' dL keeps its whole diagonal, it must be halved (Phi). So the gradient of the covariance has an extra "
    "part L^-T (diag/2) L^-1; wrong are spread.weight, spread.bias and, through the trunk's output, trunk.0. mean.weight and mean.bias are right. Equal on all ranks after DDP's average; divisor 13, no_sync and rows are right. Fix: halve "
    "the diagonal."
)
