"""A normalising flow (Glow's steps: scale and offset per channel, invertible mixing of five channels, affine coupling) on four ranks: rows on two data ranks (3 and 2), times on two (3 and 2 of five). Every
place pays the log determinant of the mixing once. The log determinant is an autograd function of its own. Gradients are summed over all ranks; the divisor is the number of values.

The bug: the function's backward gives the inverse of the matrix and not its transpose. After the class of hand-written derivatives of log|det W| (d/dW = W^-T) in flow code (Glow, WaveGlow: invertible 1x1
convolution), where the mixing starts as a rotation and the slip is easily overlooked.
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "time": 2}}}}
ROWS, TIMES, CHANNELS, HIDDEN, STEPS = 5, 5, 5, 6, 2


class LogAbsDet(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return torch.linalg.slogdet(w).logabsdet

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * torch.linalg.inv(w).T


class LogAbsDetInverse(LogAbsDet):
    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * torch.linalg.inv(w)


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(CHANNELS, CHANNELS))[0])
        with torch.no_grad():
            self.weight.add_(torch.randn(CHANNELS, CHANNELS) * 0.15)
        self.volume = lambda w: torch.linalg.slogdet(w).logabsdet

    def forward(self, x):
        return F.linear(x, self.weight), self.volume(self.weight) * x.shape[:-1].numel()


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = CHANNELS // 2
        self.net = nn.Sequential(
            nn.Linear(self.kept, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2 * (CHANNELS - self.kept))
        )

    def forward(self, x):
        a, b = x[..., : self.kept], x[..., self.kept :]
        scale, offset = self.net(a).chunk(2, -1)
        scale = torch.tanh(scale)
        return torch.cat([a, b * scale.exp() + offset], -1), scale.sum()


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(CHANNELS) * 0.2)
        self.offset = nn.Parameter(torch.randn(CHANNELS) * 0.2)
        self.mix, self.coupling = Mix(), Coupling()

    def forward(self, x):
        x = x * self.scale.exp() + self.offset
        volume = self.scale.sum() * x.shape[:-1].numel()
        x, mixed = self.mix(x)
        x, coupled = self.coupling(x)
        return x, volume + mixed + coupled


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Step() for _ in range(STEPS))

    def forward(self, x):
        x, gained = x.to(self.steps[0].scale.dtype), 0
        for step in self.steps:
            x, volume = step(x)
            gained = gained + volume
        return (x.square() / 2 + math.log(2 * math.pi) / 2).sum() - gained


class Clean:
    function = LogAbsDet

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {"x": torch.randn(ROWS, TIMES, CHANNELS, generator=g) * 1.3}

    def loss_sum(self, model, rows):
        return model(rows["x"]), rows["x"].numel()

    def distribute(self, model, ctx):
        for step in model.steps:
            step.mix.volume = self.function.apply
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        rows = batch["x"].tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        mine = rows.tensor_split(ctx.axes["time"], 1)[ctx.coords["time"]]
        for part in mine.split(2):
            (model(part) / batch["x"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "time"))


class Buggy(Clean):
    function = LogAbsDetInverse


EXPECT = dict(
    right=[r"mix|LogAbsDet|volume", r"backward|transpos|inverse|gradient|derivative|jacobian"],
    place=[r"mix|LogAbsDet|volume"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"forward .{0,30}(is|are) wrong|wrong in (the )?forward|first wrong .{0,20}forward",
        r"coupling .{0,30}(is|are) wrong|only (on )?rank [0-3]\b",
        r"steps\.\d\.(scale|offset) .{0,25}(is|are) wrong",
    ],
)
WHY = (
    "The forward is right on all ranks and micro-batches. LogAbsDet's backward returns inv(W) and not inv(W).T, on all ranks, in both flow steps; so only mix.weight's gradients of the two steps are wrong "
    "(the log determinant's part is transposed; the part of the mixed values is right, the diagonal too). Scales, offsets, couplings have right gradients on all ranks, for the log determinant depends on "
    "the weight alone. Split of rows and times, divisor 125, the sum over the four ranks are right. Fix: return grad * inv(W).T."
)
