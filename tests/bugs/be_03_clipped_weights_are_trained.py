"""Quantisation-aware training with learned step sizes (LSQ, 3 bits) of a small regression MLP under FSDP2 (fully_shard per layer and at the root) on three ranks, two micro-batches each (no gradient sync for the first). The quantiser is
an autograd Function with a straight-through backward for the weight and the LSQ gradient for the step.

The bug: the straight-through gradient of the weight is handed on everywhere, also where weight / step lies outside the range and was clipped; there it must be zero. After hustzxd/LSQuantization issue 1 (The experimental results on
ImageNet dataset), where a reader found the missing indicator of the range.
"""

import math

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
INPUTS, WIDTH, OUTPUTS, ROWS = 5, 7, 3, 11
LOWEST, HIGHEST = -4, 3
PARTS = [[(0, 2), (2, 3)], [(3, 6), (6, 8)], [(8, 9), (9, 11)]]


class LearnedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, step, saturate):
        ctx.save_for_backward(weight, step)
        ctx.saturate = saturate
        return (weight / step).clamp(LOWEST, HIGHEST).round() * step

    @staticmethod
    def backward(ctx, grad):
        weight, step = ctx.saved_tensors
        ratio = weight / step
        low, high = ratio < LOWEST, ratio > HIGHEST
        inside = ~(low | high)
        slope = torch.where(inside, ratio.round() - ratio, LOWEST * low + HIGHEST * high)
        scale = 1 / math.sqrt(weight.numel() * HIGHEST)
        along = grad * inside if ctx.saturate else grad
        return along, (grad * slope).sum().reshape(step.shape) * scale, None


class QuantLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(outputs).uniform_(-bound, bound))
        self.step = nn.Parameter(torch.tensor([bound * 0.16]))
        self.saturate = True

    def forward(self, x):
        return F.linear(x, LearnedStep.apply(self.weight, self.step, self.saturate), self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = QuantLinear(INPUTS, WIDTH)
        self.second = QuantLinear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x):
        x = F.silu(self.first(x))
        return self.last(x + F.silu(self.second(x)))


class Clean:
    saturate = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randn(ROWS, OUTPUTS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).pow(2).sum(), len(rows["y"])

    def distribute(self, model, ctx):
        for layer in (model.first, model.second):
            layer.saturate = self.saturate
            fully_shard(layer, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    saturate = False


EXPECT = dict(
    right=[
        r"(?i)LearnedStep|first|second|quant|weight|clip|clamp|saturat|straight",
        r"(?i)backward|gradient|adjoint|derivative",
    ],
    place=[r"(?i)LearnedStep|QuantLinear|(first|second)(\.weight)?\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)\blast(\.(weight|bias))? (is|are) wrong|\bbias(es)? (is|are) wrong|(?<!Learned)\bsteps? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|sync.{0,30}(missing|wrong|too early|too late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|stale|left over",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "LearnedStep's backward returns for the weight the whole incoming gradient instead of gradient * inside: elements with weight / step < -4 or > 3 were clipped in the forward, do not change the result, and must get zero. Wrong are exactly "
    "these elements of first.weight and second.weight, on all ranks' shards, in all micro-batches and rows; everything else (other elements, steps, biases, last, and the gradient to the layer's input) and the forward are right. FSDP2, sync, "
    "and the divisor are right. Fix: along = grad * inside."
)
