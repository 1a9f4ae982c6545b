"""Forecaster with a low-rank Gaussian over eleven sensors (as GluonTS' LowRankMultivariateNormal / GPyTorch's Woodbury form): covariance = D + U U^T with diagonal D and U of rank 3.
The sensors are cut over three ranks (4, 4, 3); by the matrix determinant lemma only the capacitance matrix C = I + U^T D^-1 U, the vector U^T D^-1 y and two scalars cross the ranks, summed in one
all-reduce; every rank then computes the same likelihood from them. Two micro-batches, gradients of the replicated weights summed over the ranks.

The bug: the capacitance matrix is made on each rank as in the one-device code, the identity included, and then summed, so that C = 3 I + U^T D^-1 U.
After the class "bias added on every rank before the all-reduce" (MinivLLM issue 80, Paddle PR 35186), here in a sharded Woodbury solve.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sensor": 3}}}}
SENSORS, CONTEXT, WIDTH, RANK, ROWS = 11, 5, 6, 3, 6


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.sensor = nn.Embedding(SENSORS, WIDTH)
        self.trunk = nn.Linear(CONTEXT, WIDTH)
        self.mean = nn.Linear(WIDTH, 1)
        self.noise = nn.Linear(WIDTH, 1)
        self.factor = nn.Linear(WIDTH, RANK)

    def forward(self, context, own):
        h = torch.tanh(self.trunk(context)[:, None] + self.sensor(own))
        return self.mean(h)[..., 0], 0.3 + F.softplus(self.noise(h)[..., 0]), self.factor(h)


class SumForAll(torch.autograd.Function):
    """The sum over the sensor ranks, of which every rank goes on to compute the same."""

    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
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
        return Forecaster()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "context": torch.randn(ROWS, CONTEXT, generator=g),
            "y": torch.randn(ROWS, SENSORS, generator=g),
        }

    def loss_sum(self, model, rows):
        own = torch.arange(SENSORS)
        mean, d, u = model(rows["context"], own)
        r = rows["y"] - mean
        scaled = u / d[..., None]
        c = torch.eye(RANK, dtype=u.dtype) + u.transpose(1, 2) @ scaled
        b = (scaled * r[..., None]).sum(1)
        rest = d.log().sum(1) + (r * r / d).sum(1)
        return self.likelihood(c, b, rest).sum(), len(r)

    @staticmethod
    def likelihood(c, b, rest):
        solved = torch.linalg.solve(c, b[..., None])[..., 0]
        return 0.5 * (rest + torch.logdet(c) - (b * solved).sum(1))

    def capacitance(self, u, scaled, group):
        c = SumForAll.apply(u.transpose(1, 2) @ scaled, group)
        return c + torch.eye(RANK, dtype=c.dtype)

    def nll(self, model, part, own, group):
        mean, d, u = model(part["context"], own)
        r = part["y"][:, own] - mean
        scaled = u / d[..., None]
        c = self.capacitance(u, scaled, group)
        b = SumForAll.apply((scaled * r[..., None]).sum(1), group)
        rest = SumForAll.apply(d.log().sum(1) + (r * r / d).sum(1), group)
        return self.likelihood(c, b, rest).sum()

    def step(self, model, batch, ctx):
        group = ctx.group("sensor")
        own = torch.arange(SENSORS).tensor_split(ctx.axes["sensor"])[ctx.coords["sensor"]]
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            (self.nll(model, part, own, group) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def capacitance(self, u, scaled, group):
        c = torch.eye(RANK, dtype=u.dtype) + u.transpose(1, 2) @ scaled
        return SumForAll.apply(c, group)


EXPECT = dict(
    right=[
        r"identity|\beye\b|unit matrix|diagonal|constant|\bI\b.{0,10}\+|capacitance",
        r"before the (sum|all.?reduce|reduction)|(3|three|world.?size|n) times|on (each|every|all) ranks?|per rank|each rank (adds|brings)|inside the (sum|all.?reduce)|3 ?\*? ?I\b",
    ],
    place=[
        r"capacitance",
        r"\bc\b.{0,30}SumForAll|SumForAll",
        r"torch\.eye|eye\(",
        r"likelihood|logdet|solve",
    ],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"backward of (the )?SumForAll.{0,40}(wrong|missing)|gradient.{0,20}counted (three|3) times",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|wrong (divisor|rows|group)",
    ],
)
WHY = (
    "Each of the three ranks adds the identity to its own part of the capacitance matrix U^T D^-1 U and the parts are then summed, so that every rank goes on with 3 I + U^T D^-1 U in the place of I + U^T D^-1 U. "
    "The log-determinant and the Woodbury solve are wrong on all ranks alike, in both micro-batches, and with them the gradients of all the weights (the part through D's logarithm and r^2/d is right). "
    "The all-reduce, its backward and the final reduction are right. A right cause says that the identity (a constant) enters on each rank before the sum and so counts three times. Fix: add it once, after the sum."
)
