"""An importance weighted autoencoder with five posterior samples for every row, which are cut over three ranks (2, 2 and 1): the bound of a row is the logarithm of the mean of all five importance weights, a logsumexp over the ranks.
All ranks see all rows; two micro-batches, gradients summed over the ranks.

The bug: each rank takes the logarithm of the mean of the weights of its own samples, and these bounds are averaged by the number of samples: a looser bound, log of a mean replaced by a mean of logs. After
reports on IWAE/VIMCO with the samples spread over devices by DataParallel, where K is divided by the number of devices.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"samples": 3}}}}
ROWS, FEATURES, LATENT, WIDTH, SAMPLES = 7, 6, 3, 8, 5


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh())
        self.mean, self.log_scale = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, WIDTH), nn.Tanh(), nn.Linear(WIDTH, FEATURES)
        )

    def log_weights(self, x, noise):
        """log p(x, z) - log q(z | x) up to a constant: rows times samples."""
        h = self.encoder(x)[:, None]
        log_scale = self.log_scale(h)
        z = self.mean(h) + log_scale.exp() * noise
        likelihood = -2 * (self.decoder(z) - x[:, None]).square().sum(-1)
        prior = -z.square().sum(-1) / 2
        posterior = -(noise.square() / 2 + log_scale).sum(-1)
        return likelihood + prior - posterior


class SumOfParts(torch.autograd.Function):
    """The sum over the ranks, of which each rank makes the same loss."""

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
        return AutoEncoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "noise": torch.randn(ROWS, SAMPLES, LATENT, generator=g),
        }

    def loss_sum(self, model, rows):
        log_w = model.log_weights(rows["x"], rows["noise"])
        return (math.log(SAMPLES) - log_w.logsumexp(1)).sum(), len(log_w)

    def bound(self, log_w, ctx):
        group = ctx.group("samples")
        top = log_w.detach().amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        total = SumOfParts.apply((log_w - top[:, None]).exp().sum(1), group)
        return top + total.log() - math.log(SAMPLES)

    def step(self, model, batch, ctx):
        model.zero_grad()
        noise = batch["noise"].tensor_split(ctx.world_size, 1)[ctx.rank]
        for n in range(2):
            x, own = batch["x"].tensor_split(2)[n], noise.tensor_split(2)[n]
            (-self.bound(model.log_weights(x, own), ctx).sum() / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("samples"))


class Buggy(Clean):
    def bound(self, log_w, ctx):
        k = log_w.shape[1]
        own = log_w.logsumexp(1) - math.log(k)
        return SumOfParts.apply(own * (k / SAMPLES), ctx.group("samples"))


EXPECT = dict(
    right=[
        r"bound|logsumexp|log.?mean|weights?|log_w|softmax|sample|normali[sz]|logarithm|exp",
        r"own|local|shard|each rank|per rank|part|all (the )?(five|5|samples|ranks)|global|whole|mean of (the )?log|before .{0,30}(log|sum|reduc)|after .{0,30}(log|sum|reduc)|miss.{0,40}(max|collective|reduc)",
    ],
    place=[r"bound", r"log_w", r"logsumexp", r"SumOfParts"],
    wrong=[
        r"parameters?.{0,30}(not reduced|never reduced|reduced twice)|reduced (twice|again)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|row count|wrong rows|wrong group",
        r"random|noise .{0,30}(same|differs)|SumOfParts.{0,30}backward.{0,30}(wrong|missing)",
    ],
)
WHY = (
    "The bound of a row is log (1/5) sum of all five weights, so that a sample's gradient has the weight w_k / sum of all five; the ranks' bound takes the logsumexp over their own 2, 2 and 1 samples and sums 2/5, 2/5 and 1/5 of these bounds. "
    "Each sample is then weighted by w_k over the own rank's weights (the single sample of rank 2 always with 1/5), wrong on all ranks, in both micro-batches, for all parameters. Sums over the ranks, rows, noise and divisor are right. "
    "A right cause says that the logsumexp (normalisation of the importance weights) is made of the rank's own samples, not of all. Fix: all-reduce the sum of exp(log_w - max) and take the logarithm after it."
)
