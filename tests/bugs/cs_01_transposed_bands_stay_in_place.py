"""A heat conductor with wind, made differentiable: a small net gives the conductivity between the
nine cells of a rod and the velocity in it, and three implicit time steps are taken, each of which
solves a tridiagonal system. Data parallel over two ranks (3 and 2 of 5 rods), two micro-batches
a rank. The single process solves densely; the ranks have the Thomas algorithm as an autograd
function with a backward by hand.

Bug: the backward solves with the transposed matrix. The two bands are exchanged for it, but not
moved by one cell (entry i of the lower band belongs to row i, and so does entry i of the upper
one). After ports of tridiagonal solvers (pscr/tridiag kernels) to autograd.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
RODS, CELLS, FEATURES, STEPS, DT = 5, 9, 4, 3, 0.4


def dense_solve(low, diag, up, rhs):
    a = torch.diag_embed(diag)
    a = a + torch.diag_embed(low[:, 1:], -1) + torch.diag_embed(up[:, :-1], 1)
    return torch.linalg.solve(a, rhs.unsqueeze(-1)).squeeze(-1)


def thomas(low, diag, up, rhs):
    c, d = [up[:, 0] / diag[:, 0]], [rhs[:, 0] / diag[:, 0]]
    for i in range(1, diag.shape[1]):
        pivot = diag[:, i] - low[:, i] * c[-1]
        c.append(up[:, i] / pivot)
        d.append((rhs[:, i] - low[:, i] * d[-1]) / pivot)
    x = [d[-1]]
    for i in reversed(range(diag.shape[1] - 1)):
        x.append(d[i] - c[i] * x[-1])
    return torch.stack(x[::-1], 1)


def moved(band, by):
    out = torch.zeros_like(band)
    if by > 0:
        out[:, by:] = band[:, :-by]
    else:
        out[:, :by] = band[:, -by:]
    return out


class Thomas(torch.autograd.Function):
    @staticmethod
    def forward(ctx, low, diag, up, rhs):
        x = thomas(low, diag, up, rhs)
        ctx.save_for_backward(low, diag, up, x)
        return x

    @staticmethod
    def backward(ctx, g):
        low, diag, up, x = ctx.saved_tensors
        v = thomas(moved(up, 1), diag, moved(low, -1), g)
        return -v * moved(x, 1), -v * x, -v * moved(x, -1), v


class ThomasPort(Thomas):
    @staticmethod
    def backward(ctx, g):
        low, diag, up, x = ctx.saved_tensors
        v = thomas(up, diag, low, g)
        return -v * moved(x, 1), -v * x, -v * moved(x, -1), v


class Rod(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(FEATURES, CELLS)
        self.conductivity = nn.Linear(FEATURES, CELLS - 1)
        self.velocity = nn.Linear(FEATURES, 1)
        self.source = nn.Parameter(torch.randn(CELLS) * 0.3)
        self.solve = dense_solve

    def forward(self, z):
        k = F.pad(F.softplus(self.conductivity(z)) * DT, (1, 1))
        wind = DT * torch.tanh(self.velocity(z))
        low, up = -k[:, :-1] - wind, -k[:, 1:] + wind
        diag = 1 + k[:, :-1] + k[:, 1:]
        u = self.start(z)
        for _ in range(STEPS):
            u = self.solve(low, diag, up, u + DT * self.source)
        return u


class Clean:
    solver = Thomas

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Rod()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 111)
        return {
            "z": torch.randn(RODS, FEATURES, generator=g),
            "u": torch.randn(RODS, CELLS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["z"]) - rows["u"]).square().sum(), rows["u"].numel()

    def distribute(self, model, ctx):
        model.solve = self.solver.apply
        return model

    def step(self, model, batch, ctx):
        rows = torch.arange(RODS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in rows.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / batch["u"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    solver = ThomasPort


EXPECT = dict(
    right=[
        r"backward|adjoint|transpos|vjp|way back",
        r"band|diagonal|\blow\b|\bup\b|\blower\b|\bupper\b|tridiag|matrix|system|Thomas",
        r"shift|moved|roll|offset|one (cell|row|place|position)|misalign|transpos|neighbou?r|index",
    ],
    place=[r"ThomasPort", r"Thomas\w*\.backward", r"thomas\(up, diag, low", r"\bsolve[rd]?\b"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"forward.{0,30}(solution|value|output)s? (is|are) wrong",
        r"(micro.?batch|rank).{0,30}(count|divis|normali[sz])",
        r"conductivity.{0,30}(not|never) (summed|reduced)",
    ],
)
WHY = """In row i of the system low[i] multiplies x[i-1] and up[i] multiplies x[i+1]. The transposed
matrix has up[i-1] below its diagonal and low[i+1] above it. ThomasPort.backward exchanges the two
bands without moving them by one, so that it solves with a matrix that is not the transpose; the
forward is right, the gradients with respect to the right side and to all bands are wrong. A right
cause names the solver's backward and bands. Fix: thomas(moved(up, 1), diag, moved(low, -1), g)."""
