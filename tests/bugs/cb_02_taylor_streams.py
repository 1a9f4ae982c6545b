"""A physics-informed network for a heat equation, u_t - kappa u_xx = f, with its derivatives by Taylor mode: every layer carries four streams (value, d/dx, d/dt, d2/dx2), so that no second backward is needed. Three
tensor parallel ranks: the first layer is cut by its outputs (7 hidden units: 3, 2 and 2), the second by its inputs and summed over "tp" in one message for all streams; the last layer is replicated. Two micro-batches.

The bug: the row parallel layer adds its bias to the whole message, that is to all four streams, whereas the derivative of a constant is zero. After forward-Laplacian and jet implementations (folx, jet-PINN ports) whose
tensor parallel linear layer was taken over as it is.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, HIDDEN, WIDTH, MICRO = 9, 7, 5, 2


def tanh_streams(s):
    value, dx, dt, dxx = s
    y = torch.tanh(value)
    first = 1 - y * y
    return torch.stack((y, first * dx, first * dt, first * dxx - 2 * y * first * dx * dx))


def linear_streams(s, weight, bias):
    y = F.linear(s, weight)
    return torch.cat((y[:1] + bias, y[1:]))


def start_streams(points):
    one, zero = torch.ones_like(points[:, 0]), torch.zeros_like(points[:, 0])
    along_x, along_t = torch.stack((one, zero), 1), torch.stack((zero, one), 1)
    return torch.stack((points, along_x, along_t, torch.zeros_like(points)))


class Heat(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(2, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.out = nn.Linear(WIDTH, 1)
        self.log_kappa = nn.Parameter(torch.tensor([-0.4]))

    def residual(self, s, source):
        u = linear_streams(s, self.out.weight, self.out.bias).squeeze(-1)
        return u[2] - self.log_kappa.exp() * u[3] + 0.5 * u[0] - source

    def forward(self, points, source):
        s = tanh_streams(linear_streams(start_streams(points), self.up.weight, self.up.bias))
        s = tanh_streams(linear_streams(s, self.down.weight, self.down.bias))
        return self.residual(s, source)


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Heat()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "points": torch.rand(ROWS, 2, generator=g) * 2 - 1,
            "source": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        residual = model(rows["points"], rows["source"])
        return residual.square().sum(), len(residual)

    def distribute(self, model, ctx):
        own = torch.arange(HIDDEN).tensor_split(ctx.axes["tp"])[ctx.coords["tp"]]
        model.up.weight = nn.Parameter(model.up.weight.detach()[own].clone())
        model.up.bias = nn.Parameter(model.up.bias.detach()[own].clone())
        model.down.weight = nn.Parameter(model.down.weight.detach()[:, own].clone())
        return model

    def row_parallel(self, layer, streams, group):
        partial = F.linear(streams, layer.weight)
        y = ReduceFromTensorParallel.apply(partial, group)
        return torch.cat((y[:1] + layer.bias, y[1:]))

    def step(self, model, batch, ctx):
        for n in range(MICRO):
            points = batch["points"].tensor_split(MICRO)[n]
            source = batch["source"].tensor_split(MICRO)[n]
            s = linear_streams(start_streams(points), model.up.weight, model.up.bias)
            s = self.row_parallel(model.down, tanh_streams(s), ctx.group("tp"))
            residual = model.residual(tanh_streams(s), source)
            (residual.square().sum() / ROWS).backward()


class Buggy(Clean):
    def row_parallel(self, layer, streams, group):
        partial = F.linear(streams, layer.weight)
        return ReduceFromTensorParallel.apply(partial, group) + layer.bias


EXPECT = dict(
    right=[
        r"bias|constant|offset",
        r"stream|derivative|tangent|jet|taylor|channels?|all (four|4)|every (one|row|slice)|first (one|slice|entry)|only.{0,30}(value|first)|forward|too (often|many)|broadcast|value",
    ],
    place=[r"row_parallel", r"\bdown\b", r"layer\.bias|down\.bias", r"after .{0,30}all.?reduce"],
    wrong=[
        r"bias .{0,40}(each|every|all|three|3) ranks?.{0,30}(adds|added|times)|bias.{0,40}(three|3) times",
        r"missing (all.?)?reduc|never reduced|not reduced|reduced twice",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|divisor|mean of means",
        r"backward .{0,20}(of )?.{0,20}(all.?reduce|Reduce).{0,30}(wrong|missing)|wrong group|wrong rows",
    ],
)
WHY = (
    "The message of the row parallel layer holds four streams: value, d/dx, d/dt and d2/dx2; the bias belongs to the value alone, its derivatives are zero. Buggy adds down.bias to all four after the all-reduce, on all three ranks "
    "alike and in both micro-batches, so that u_t, u_x and u_xx are wrong and with them the residual and every gradient; the gradient of down.bias also comes from four streams. A right cause says that the bias of the down layer is added "
    "to the derivative streams too (the forward computes something else there); that it is added once per rank would be false. Fix: add it to the first stream only."
)
