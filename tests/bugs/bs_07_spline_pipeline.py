"""Kolmogorov-Arnold network with quadratic B-splines on a fixed non-uniform knot vector (as efficient-kan / pykan after grid update), its three layers on three pipeline stages with three micro-batches,
sent forth and back by send/recv. The spline basis is an autograd Function that keeps only x and evaluates the basis of one degree less in the backward, as fused KAN kernels do.

The bug: the derivative of the basis takes the knot spans of the forward recursion: B'_i = k (B_{i,k-1} / (t_{i+k} - t_i) - B_{i+1,k-1} / (t_{i+k+1} - t_{i+1})), but the second term is divided by the first term's span,
which is right on a uniform grid only. After issues about fused KAN kernels whose gradients are right until update_grid makes the knots non-uniform.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
KNOTS = (-2.6, -1.7, -1.1, -0.4, -0.1, 0.5, 0.8, 1.6, 2.3)
DEGREE, SIZES, ROWS, MICRO = 2, (4, 5, 5, 3), 8, 3


def basis(x, knots, degree):
    """B-splines of one degree at x, by Cox-de Boor."""
    x = x[..., None]
    b = ((x >= knots[:-1]) & (x < knots[1:])).to(x.dtype)
    for k in range(1, degree + 1):
        left = (x - knots[: -k - 1]) / (knots[k:-1] - knots[: -k - 1])
        right = (knots[k + 1 :] - x) / (knots[k + 1 :] - knots[1:-k])
        b = left * b[..., :-1] + right * b[..., 1:]
    return b


class SplineBasis(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, knots):
        fctx.save_for_backward(x, knots)
        return basis(x, knots, DEGREE)

    @staticmethod
    def backward(fctx, grad):
        x, t = fctx.saved_tensors
        lower = basis(x, t, DEGREE - 1)
        first = lower[..., :-1] / (t[DEGREE:-1] - t[: -DEGREE - 1])
        second = lower[..., 1:] / (t[DEGREE + 1 :] - t[1:-DEGREE])
        return (grad * DEGREE * (first - second)).sum(-1), None


class FusedBasis(torch.autograd.Function):
    """The basis with the spans computed once for both terms of the derivative."""

    @staticmethod
    def forward(fctx, x, knots):
        fctx.save_for_backward(x, knots)
        return basis(x, knots, DEGREE)

    @staticmethod
    def backward(fctx, grad):
        x, t = fctx.saved_tensors
        lower = basis(x, t, DEGREE - 1)
        span = t[DEGREE:-1] - t[: -DEGREE - 1]
        slope = DEGREE * (lower[..., :-1] - lower[..., 1:]) / span
        return (grad * slope).sum(-1), None


class KANLayer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.register_buffer("knots", torch.tensor(KNOTS))
        self.base = nn.Linear(inputs, outputs)
        self.spline = nn.Parameter(0.4 * torch.randn(outputs, inputs, len(KNOTS) - DEGREE - 1))

    def forward(self, x, splines=SplineBasis):
        curves = splines.apply(x, self.knots)
        return self.base(F.silu(x)) + torch.einsum("nik,oik->no", curves, self.spline)


class KAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(KANLayer(a, b) for a, b in zip(SIZES, SIZES[1:]))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return KAN()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, SIZES[0], generator=g),
            "y": torch.randn(ROWS, SIZES[-1], generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["y"])

    def stage_forward(self, layer, x):
        return layer(x)

    def step(self, model, batch, ctx):
        stage, last, group = ctx.coords["pp"], ctx.axes["pp"] - 1, ctx.group("pp")
        ranks = dist.get_process_group_ranks(group)
        layer = model.layers[stage]
        for p in model.parameters():
            p.grad = None
        xs, ys = batch["x"].tensor_split(MICRO), batch["y"].tensor_split(MICRO)
        kept = []
        for x, y in zip(xs, ys):
            if stage > 0:
                x = x.new_empty(len(x), SIZES[stage])
                dist.recv(x, ranks[stage - 1], group=group)
                x.requires_grad_()
            out = self.stage_forward(layer, x)
            if stage < last:
                dist.send(out.detach().contiguous(), ranks[stage + 1], group=group)
            else:
                out = (out - y).square().sum() / ROWS
            kept.append((x, out))
        for x, out in kept:
            grad = None
            if stage < last:
                grad = torch.empty_like(out)
                dist.recv(grad, ranks[stage + 1], group=group)
            out.backward(grad)
            if stage > 0:
                dist.send(x.grad.contiguous(), ranks[stage - 1], group=group)
        for i, other in enumerate(model.layers):
            for p in other.parameters():
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                dist.broadcast(p.grad, ranks[i], group=group)


class Buggy(Clean):
    def stage_forward(self, layer, x):
        return layer(x, FusedBasis)


EXPECT = dict(
    right=[
        r"backward|derivative|gradient of|adjoint|slope|jacobian|vjp|way back",
        r"spline|basis|FusedBasis|knot|span|autograd(\.| )?Function|custom function",
    ],
    place=[r"FusedBasis", r"span|slope|knots", r"KANLayer|stage_forward|splines\.apply"],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|counted (twice|three times)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten|swapped)|wrong micro.?batch|(send|recv|receive).{0,40}(wrong|stale|overwrit)",
        r"forward (is|differs|of).{0,20}(wrong|differ)|stage 2.{0,50}(weights?|parameters?).{0,20}wrong",
    ],
)
WHY = (
    "The backward of FusedBasis divides both terms of the derivative by the span of the first, t_{i+2} - t_i; the second needs t_{i+3} - t_{i+1}. The knots are non-uniform, so the gradient with respect to x, and nothing else, is wrong: "
    "forward, loss and the last stage's weights are right; stage 1's weights get a wrong gradient through layer 2's input, stage 0's through two of them, in all micro-batches. "
    "A right cause says that the backward (derivative) of the spline basis with respect to its input is wrong, on stages 1 and 2 (where their x has a gradient). Fix: each term its own span."
)
