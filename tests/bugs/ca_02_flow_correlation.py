"""Optical flow as in PWC-Net: a small feature net on both frames, a cost volume over displacements up to two pixels, a decoder of convolutions, and the end point error. Plain data parallelism over three ranks with uneven rows, two
micro-batches each, gradients summed. What the ranks run computes the cost volume in a custom autograd Function that does not keep the shifted copies; its backward is written by hand.

The bug: in the backward, what the second frame's features get is shifted the same way as in the forward, not the opposite way.
After the correlation layers of the flow code bases (FlowNet2 / PWC-Net correlation kernels; several reports of gradcheck failing for the second input only).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIZE, CHANNELS, REACH = 8, (7, 6), 4, 2
DISPLACEMENTS = [(dy, dx) for dy in range(-REACH, REACH + 1) for dx in range(-REACH, REACH + 1)]


def shifted(x, dy, dx):
    """x at (y + dy, x + dx), zero outside."""
    h, w = x.shape[-2:]
    padded = F.pad(x, (REACH,) * 4)
    return padded[..., REACH + dy : REACH + dy + h, REACH + dx : REACH + dx + w]


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(len(DISPLACEMENTS) + CHANNELS, 6, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(6, 2, 3, padding=1),
        )

    def forward(self, first, second, correlation):
        one, two = self.features(first), self.features(second)
        return self.decoder(torch.cat([correlation(one, two), one], 1))


def plain_correlation(one, two):
    return torch.stack([(one * shifted(two, dy, dx)).mean(1) for dy, dx in DISPLACEMENTS], 1)


class Correlation(torch.autograd.Function):
    @staticmethod
    def forward(fctx, one, two):
        fctx.save_for_backward(one, two)
        return plain_correlation(one, two)

    @staticmethod
    def backward(fctx, grad):
        one, two = fctx.saved_tensors
        grad_one, grad_two = torch.zeros_like(one), torch.zeros_like(two)
        for n, (dy, dx) in enumerate(DISPLACEMENTS):
            g = grad[:, n : n + 1] / one.shape[1]
            grad_one += g * shifted(two, dy, dx)
            grad_two += shifted(g * one, -dy, -dx)
        return grad_one, grad_two


class CostVolume(torch.autograd.Function):
    """The same volume, both gradients accumulated in one sweep over the displacements."""

    @staticmethod
    def forward(fctx, one, two):
        fctx.save_for_backward(one, two)
        return plain_correlation(one, two)

    @staticmethod
    def backward(fctx, grad):
        one, two = fctx.saved_tensors
        grad_one, grad_two = torch.zeros_like(one), torch.zeros_like(two)
        for n, (dy, dx) in enumerate(DISPLACEMENTS):
            g = grad[:, n : n + 1] / one.shape[1]
            grad_one += g * shifted(two, dy, dx)
            grad_two += shifted(g * one, dy, dx)
        return grad_one, grad_two


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return FlowNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        first = torch.randn(ROWS, 3, *SIZE, generator=g)
        return {
            "first": first,
            "second": first.roll(1, -1) + 0.3 * torch.randn(ROWS, 3, *SIZE, generator=g),
            "flow": torch.randn(ROWS, 2, *SIZE, generator=g),
        }

    @staticmethod
    def end_point_error(flow, truth):
        return ((flow - truth).square().sum(1) + 1e-3).sqrt().mean((1, 2)).sum()

    def loss_sum(self, model, rows):
        flow = model(rows["first"], rows["second"], plain_correlation)
        return self.end_point_error(flow, rows["flow"]), len(flow)

    def correlate(self, one, two):
        return Correlation.apply(one, two)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            part = {k: v.tensor_split(2)[m] for k, v in mine.items()}
            flow = model(part["first"], part["second"], self.correlate)
            (self.end_point_error(flow, part["flow"]) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def correlate(self, one, two):
        return CostVolume.apply(one, two)


EXPECT = dict(
    right=[
        r"backward|gradient|adjoint|transpose|derivative|vjp|jacobian",
        r"CostVolume|correlat|cost.?volume|autograd.?Function|custom function|correlate",
    ],
    place=[
        r"CostVolume",
        r"grad_two|second|\btwo\b|input 1|argument 1",
        r"shifted|shift|displac",
        r"correlate",
    ],
    wrong=[
        r"(missing|lacks?|without|never|not) (all.?)?reduc|reduced twice|not reduced",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"divisor|mean of means|own (rows|count)|(wrong|other) rows",
        r"(decoder|end_point_error).{0,40}(wrong|is the cause)|forward .{0,20}(wrong|differs)",
    ],
)
WHY = (
    "CostVolume's forward is right. Channel (dy, dx) is one(p) times two(p + d), so two at q gets g times one at q - d; the backward reads q + d instead, and only the displacement (0, 0) comes out right. Each rank's "
    "gradient of the second frame's features is therefore wrong in each micro-batch, and with it all of the feature net (both convolutions), while the decoder's gradients, the loss and the reduction are right. A right cause names the "
    "hand-written backward of the cost volume (its second input). Fix: shifted(g * one, -dy, -dx)."
)
