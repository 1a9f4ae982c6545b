"""A linear-attention block with tensor parallelism by hand on three ranks (two of six heads each), two micro-batches. After the causal mixing every head is RMS-normalised, multiplied with a shared weight and a SiLU gate, and goes into the
row-parallel output projection; norm, gate and projection are one autograd Function, which keeps its inputs and recomputes the projection's input in the backward.

The bug: the recomputation stops at the normalised and weighted value and leaves out the gate; the projection's weight gradient is made of it. Forward and all other gradients are right. After fla-org/flash-linear-attention PR 1071 (Gate
the recomputed output in layer_norm_gated backward).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
INPUTS, WIDTH, HEADS, HEAD, TOKENS, ROWS = 5, 8, 6, 3, 4, 7
PARTS = [(0, 4), (4, 7)]


class NormGateLinear(torch.autograd.Function):
    """o, g (rows, tokens, heads, head); scale (head); weight (width, heads * head)."""

    @staticmethod
    def forward(ctx, o, g, scale, weight, gated):
        ctx.save_for_backward(o, g, scale, weight)
        ctx.gated = gated
        r = (o.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return (o * r * scale * F.silu(g)).flatten(2) @ weight.T

    @staticmethod
    def backward(ctx, grad):
        o, g, scale, weight = ctx.saved_tensors
        r = (o.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        n, s, gate = o * r, torch.sigmoid(g), F.silu(g)
        y = n * scale
        if ctx.gated:
            y = y * gate
        d_weight = torch.einsum("rto,rti->oi", grad, y.flatten(2))
        d_y = (grad @ weight).view_as(o)
        d_gate = d_y * n * scale * (s + g * s * (1 - s))
        d_scaled = d_y * gate
        d_scale = (d_scaled * n).sum((0, 1, 2))
        d_n = d_scaled * scale
        d_o = r * (d_n - n * (d_n * n).mean(-1, keepdim=True))
        return d_o, d_gate, d_scale, d_weight, None


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(INPUTS, WIDTH)
        self.value = nn.Linear(WIDTH, HEADS * HEAD)
        self.gate = nn.Linear(WIDTH, HEADS * HEAD)
        self.scale = nn.Parameter(1 + 0.3 * torch.randn(HEAD))
        self.out = nn.Linear(HEADS * HEAD, WIDTH)
        self.read = nn.Linear(WIDTH, 1)
        self.group, self.gated = None, True

    def forward(self, x):
        x = F.silu(self.lift(x))
        h = x if self.group is None else Enter.apply(x, self.group)
        v = self.value(h).unflatten(2, (-1, HEAD))
        g = self.gate(h).unflatten(2, (-1, HEAD))
        o = v.cumsum(1)
        y = NormGateLinear.apply(o, g, self.scale, self.out.weight, self.gated)
        if self.group is not None:
            y = Leave.apply(y, self.group)
        return self.read(x + y + self.out.bias).squeeze(2)


class Clean:
    gated = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, TOKENS, INPUTS, generator=g),
            "y": torch.randn(ROWS, TOKENS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).pow(2).sum(), rows["y"].numel()

    def distribute(self, model, ctx):
        size, place = HEADS * HEAD // 3, ctx.coords["tp"]
        own = slice(place * size, (place + 1) * size)
        for layer in (model.value, model.gate):
            layer.weight = nn.Parameter(layer.weight.detach()[own].clone())
            layer.bias = nn.Parameter(layer.bias.detach()[own].clone())
        model.out.weight = nn.Parameter(model.out.weight.detach()[:, own].clone())
        model.group, model.gated = ctx.group("tp"), self.gated
        return model

    def step(self, model, batch, ctx):
        for low, high in PARTS:
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / batch["y"].numel()).backward()
        dist.all_reduce(model.scale.grad, group=ctx.group("tp"))


class Buggy(Clean):
    gated = False


EXPECT = dict(
    right=[r"(?i)out(\.weight)?\b|NormGateLinear", r"(?i)backward|gradient|adjoint|recomput"],
    place=[r"(?i)\bout(\.weight)?\b|NormGateLinear"],
    wrong=[
        r"(?i)(?<!not )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\b(value|gate|lift|read|scale)(\.(weight|bias))? (is|are) wrong|out\.bias (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|missing (all.?)?reduc",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|stale|left over|another slice|wrong slice",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "NormGateLinear.backward recomputes the input of the projection as n * scale, without the gate SiLU(g) (gated False), so d_weight = grad^T (n * scale) instead of grad^T (n * scale * SiLU(g)). Wrong is only out.weight, all columns (each rank's slice "
    "of two heads), in all rows, tokens and micro-batches on all ranks. Forward, gradients of value, gate, scale, lift, read, out.bias, and everything about tensor parallelism (Enter, Leave, the sum of scale's gradient) are right. Fix: y = y * gate "
    "before d_weight."
)
