"""A residual normalizing flow on molecule-like descriptors (two invertible blocks y = x + g(x)),
rows over dp (2), hidden units of g cut over tp (2), micro-batches of two rows. The log-determinant
is the power series of log(I + J) with six terms; on the ranks a custom function computes it and
its gradient in closed form, so that no graph through the powers of J is kept.

Bug: the closed form of the gradient keeps the 1/k of the forward's series. The derivative of
tr(J^k)/k is tr(J^(k-1) dJ), so the k goes away. After memory-saving ("Neumann") gradients of
residual flows whose coefficients were shared with the forward.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, D, H, TERMS = 7, 5, 9, 6


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class LogDet(torch.autograd.Function):
    """log det(I + J) by its power series; the gradient is the transposed series of the inverse."""

    @staticmethod
    def forward(ctx, jac):
        ctx.save_for_backward(jac)
        power, total = jac, jac.new_zeros(jac.shape[0])
        for k in range(1, TERMS + 1):
            total = total + (-1) ** (k + 1) / k * power.diagonal(dim1=1, dim2=2).sum(-1)
            power = power @ jac
        return total

    @staticmethod
    def backward(ctx, g):
        (jac,) = ctx.saved_tensors
        power = torch.eye(jac.shape[1], dtype=jac.dtype).expand_as(jac)
        total = torch.zeros_like(jac)
        for k in range(1, TERMS + 1):
            total = total + (-1) ** (k + 1) * power
            power = power @ jac
        return g[:, None, None] * total.transpose(1, 2)


class LogDetSeries(LogDet):
    @staticmethod
    def backward(ctx, g):
        (jac,) = ctx.saved_tensors
        power = torch.eye(jac.shape[1], dtype=jac.dtype).expand_as(jac)
        total = torch.zeros_like(jac)
        for k in range(1, TERMS + 1):
            total = total + (-1) ** (k + 1) / k * power
            power = power @ jac
        return g[:, None, None] * total.transpose(1, 2)


def plain_log_det(jac):
    power, total = jac, 0.0
    for k in range(1, TERMS + 1):
        total = total + (-1) ** (k + 1) / k * torch.einsum("nii->n", power)
        power = torch.einsum("nij,njk->nik", power, jac)
    return total


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Parameter(0.35 * torch.randn(H, D))
        self.shift = nn.Parameter(0.3 * torch.randn(H))
        self.outer = nn.Parameter(0.35 * torch.randn(D, H))
        self.bias = nn.Parameter(0.1 * torch.randn(D))
        self.group = None

    def forward(self, x, log_det):
        part = x if self.group is None else Copy.apply(x, self.group)
        h = torch.tanh(part @ self.inner.t() + self.shift)
        g = h @ self.outer.t()
        jac = torch.einsum("ih,nh,hj->nij", self.outer, 1 - h * h, self.inner)
        if self.group is not None:
            g, jac = Join.apply(g, self.group), Join.apply(jac, self.group)
        return x + g + self.bias, log_det(jac)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.log_scale = nn.Parameter(0.2 * torch.randn(D))

    def forward(self, x, log_det=plain_log_det):
        total = self.log_scale.sum()
        x = x * self.log_scale.exp()
        for block in self.blocks:
            x, value = block(x, log_det)
            total = total + value
        return x, total


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 11)
        return Flow()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 110)
        return {"x": torch.randn(ROWS, D, generator=g)}

    def nll(self, z, log_det):
        return (0.5 * z.square().sum(-1) - log_det).sum()

    def loss_sum(self, model, rows):
        return self.nll(*model(rows["x"])), rows["x"].shape[0]

    def log_det(self, jac):
        return LogDet.apply(jac)

    def distribute(self, model, ctx):
        tp, r = ctx.axes["tp"], ctx.coords["tp"]
        a, b = [round(i * H / tp) for i in range(tp + 1)][r : r + 2]
        for block in model.blocks:
            block.inner = nn.Parameter(block.inner.detach()[a:b].clone())
            block.shift = nn.Parameter(block.shift.detach()[a:b].clone())
            block.outer = nn.Parameter(block.outer.detach()[:, a:b].clone())
            block.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for rows in own.split(2):
            z, log_det = model(batch["x"][rows], self.log_det)
            (self.nll(z, log_det) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def log_det(self, jac):
        return LogDetSeries.apply(jac)


EXPECT = dict(
    right=[
        r"log.?det|jacobian|series|LogDet|neumann|determinant",
        r"backward|gradient|derivative|adjoint",
        r"1\s*/\s*k|/\s*k\b|divid|coefficient|factor|harmonic|weight|series|differs? from|inconsist"
        r"|not the (derivative|gradient|adjoint)|does not (match|agree)|disagree",
    ],
    place=[r"LogDetSeries", r"\blog_det\b", r"\(-1\) \*\* \(k \+ 1\) / k"],
    wrong=[
        r"transpos\w+ .{0,30}(missing|forgotten|wrong)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"\b(Copy|Join)\b.{0,40}(wrong|missing|adjoint)",
        r"(micro.?batch|rank).{0,30}(mean of means|averag)",
        r"log_scale.{0,30}(wrong|missing)",
    ],
)
WHY = """LogDetSeries.backward multiplies the powers of J by (-1)^(k+1)/k, the coefficients of the
forward's series. The gradient of (-1)^(k+1) tr(J^k)/k with respect to J is (-1)^(k+1) (J^T)^(k-1):
the 1/k cancels with the k of the power rule. Losses are right; all that reaches the parameters
through the log-determinant is wrong (from the second term on). A right cause says that the backward
of the log-determinant function is wrong (has a factor 1/k too many). Fix: leave out the 1/k."""
