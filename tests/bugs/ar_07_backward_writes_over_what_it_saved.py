"""Tensor parallelism by hand on two ranks, two micro-batches of three and two rows: a SwiGLU layer whose inner features are cut into parts of 4 and 3, with an own autograd Function for silu(a) * b, feeds two heads (classes and a
regression). Each micro-batch calls backward once for each head's loss, the first with retain_graph=True, to free the head's memory early.

The bug: to save memory, the Function writes the gradients of a and b into the saved a and b (through .data, as a kernel does, so that no version counter notices). The second backward through the same node reads gradients in place of
activations. As in triton-lang/triton issue 4004 (input overwritten with the gradient, backward called twice, no error) and the review of axolotl-ai-cloud/axolotl PR 3892 (second backward over the same graph silently returns garbage).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
FEATURES, WIDTH, INNER, CLASSES, ROWS = 5, 6, 7, 4, 5
CUTS = [(0, 4), (4, 7)]
MICRO = [(0, 3), (3, 5)]


class SumBack(torch.autograd.Function):
    """Same in the forward, sum over the ranks in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """Sum over the ranks in the forward, same in the backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, reuse):
        ctx.save_for_backward(a, b)
        ctx.reuse = reuse
        return F.silu(a) * b

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        gate = torch.sigmoid(a)
        da = grad * b * gate * (1 + a * (1 - gate))
        db = grad * a * gate
        if ctx.reuse:
            a.data.copy_(da)
            b.data.copy_(db)
        return da, db, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.classes, self.value = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)
        self.cut, self.group, self.reuse = None, None, False

    def mlp(self, x):
        if self.group is None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        part = slice(*self.cut)
        x = SumBack.apply(x, self.group)
        a = F.linear(x, self.gate.weight[part], self.gate.bias[part])
        b = F.linear(x, self.up.weight[part], self.up.bias[part])
        inner = SwiGLU.apply(a, b, self.reuse)
        return Sum.apply(F.linear(inner, self.down.weight[:, part]), self.group)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        x = x + self.mlp(self.norm(x))
        return self.classes(x), self.value(x).squeeze(-1)


def losses(model, rows):
    scores, value = model(rows["x"])
    return (
        F.cross_entropy(scores, rows["label"], reduction="sum"),
        F.mse_loss(value, rows["value"], reduction="sum"),
    )


class Clean:
    reuse = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
            "value": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return sum(losses(model, rows)), len(rows["label"])

    def distribute(self, model, ctx):
        model.cut, model.group, model.reuse = CUTS[ctx.rank], ctx.group("tp"), self.reuse
        return model

    def step(self, model, batch, ctx):
        for low, high in MICRO:
            rows = {k: v[low:high] for k, v in batch.items()}
            first, second = losses(model, rows)
            (first / ROWS).backward(retain_graph=True)
            (second / ROWS).backward()
        for layer in (model.gate, model.up, model.down):
            for p in layer.parameters():
                dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    reuse = True


EXPECT = dict(
    right=[
        r"(?i)swiglu|gate|\bup\b|mlp|activation",
        r"(?i)backward|saved|gradient",
        r"(?i)second|twice|overwr|in.?place|saved|chang|value|regression|mse|two (losses|backward)"
        r"|again|adjoint|not the (adjoint|derivative|transpose)|wrong in the backward|own backward",
    ],
    place=[r"(?i)swiglu|gate|\bup\b|mlp"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(classes|value)\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank \d\b|rank \d alone|only the (first|last) micro.?batch",
        r"(?i)down\.weight (is|are) wrong",
    ],
)
WHY = (
    "The forward is right, and so is the first backward of every micro-batch (classification). It leaves the gradients of a and b in the saved a and b; the second backward (regression, through the retained graph) computes "
    "silu' and the products from these numbers. So the regression's share of gate, up (weights and biases) and of what lies before them (norm, inp) is wrong, on both ranks and in both micro-batches; the classification's share "
    "is right. down, classes and value are right: down's input is another tensor. SumBack, Sum, the all-reduce of gate, up and down, divisor 5 are right. Fix: do not write into saved tensors (reuse=False), or add the losses "
    "and call backward once."
)
