"""beta-TCVAE (Chen et al. 2018), data parallel on two ranks with uneven rows (6 and 5): reconstruction plus index-code mutual information, beta times the total correlation, and the dimension-wise KL. The density of the aggregate posterior q(z)
at a sample is estimated over the batch (minibatch weighted sampling): a logsumexp over the posteriors of all rows. Means and variances are gathered with their gradient for it.

The bug: q(z) and its marginals are estimated over the rows of the own rank, as in the single-process code. The decomposition's three terms no longer estimate those of the batch; the constant log(N M) has no gradient, so it is not what is
missed. After questions on disentanglement code under DDP (results that change with the number of GPUs at the same global batch).
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, PIXELS, WIDTH, LATENT, BETA, DATASET = 11, 12, 10, 3, 4.0, 700


class AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, span, group):
        ctx.span, ctx.group = span, group
        whole = x.new_zeros(ROWS, x.shape[1])
        whole[span] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.span], None, None


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.Tanh())
        self.mean, self.log_scale = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, WIDTH), nn.Tanh(), nn.Linear(WIDTH, PIXELS))

    def forward(self, x, noise):
        y = self.encoder(x)
        mean, log_scale = self.mean(y), 0.5 * torch.tanh(self.log_scale(y))
        z = mean + noise * log_scale.exp()
        return self.decoder(z), z, mean, log_scale


def log_normal(z, mean, log_scale):
    part = (z - mean) * torch.exp(-log_scale)
    return -0.5 * part**2 - log_scale - 0.5 * math.log(2 * math.pi)


def tc_loss(x, decoded, z, mean, log_scale, population):
    """The sum over the rows of z; the population's means and scales estimate q(z)."""
    recon = ((decoded - x) ** 2).sum(1)
    given_x = log_normal(z, mean, log_scale).sum(1)
    prior = log_normal(z, torch.zeros_like(z), torch.zeros_like(z)).sum(1)
    each = log_normal(z[:, None], population[0][None], population[1][None])
    size = math.log(DATASET * len(population[0]))
    joint = torch.logsumexp(each.sum(2), 1) - size
    marginals = (torch.logsumexp(each, 1) - size).sum(1)
    information, correlation, dimensions = given_x - joint, joint - marginals, marginals - prior
    return (recon + information + BETA * correlation + dimensions).sum()


class Clean:
    gathered = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Vae()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, PIXELS, generator=g),
            "noise": torch.randn(ROWS, LATENT, generator=g),
        }

    def loss_sum(self, model, rows):
        decoded, z, mean, log_scale = model(rows["x"], rows["noise"])
        loss = tc_loss(rows["x"], decoded, z, mean, log_scale, (mean, log_scale))
        return loss, len(rows["x"])

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.world_size)[ctx.rank]
        span, group = slice(int(own[0]), int(own[-1]) + 1), ctx.group("dp")
        x, noise = batch["x"][span], batch["noise"][span]
        decoded, z, mean, log_scale = model(x, noise)
        population = mean, log_scale
        if self.gathered:
            population = tuple(AllRows.apply(p, span, group) for p in population)
        (tc_loss(x, decoded, z, mean, log_scale, population) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    gathered = False


EXPECT = dict(
    right=[
        r"(?i)loss|pairs?|rows of (the )?other|coupl|cross|statistic|gather",
        r"(?i)own rows|other ranks?|each rank|local|across ranks|rank's rows|between (rows|ranks)|gather|rank by rank|per rank|its own",
    ],
    place=[r"(?i)loss|mean|log_scale|encoder|coupl|pairs?|statistic"],
    wrong=[
        r"(?i)forward of the (model|modules) (is|goes) wrong|goes wrong in the forward of",
        r"(?i)parameters? .{0,30}(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?2\b",
        r"(?i)(decoder[\w.]*|mean\.bias) (is|are) wrong",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
    ],
)
WHY = (
    "joint and marginals, the estimates of log q(z) and of its marginals, must sum the densities under the posteriors of all 11 rows; each rank sums over its own 6 or 5. The pairs of a sample of one rank with the posterior of a row of the "
    "other rank are missing, in the value and in the gradient, both that of the sample and that of the posterior's mean and log_scale; the remaining pairs get too large a share of the logsumexp. Outputs of all modules are right on both "
    "ranks; the loss is wrong. Wrong, in direction, and the same on both ranks after the sum: mean.weight, log_scale and encoder; mean.bias is right, since a common shift of all means moves the samples along and changes neither estimate. "
    "The decoder has only the reconstruction, which is a sum over rows, and is right. The all-reduce of the parameters, the divisor 11, the rows and the noise are right; the constant log(N M) does not matter. Fix: gather means and "
    "log_scales of all ranks with their gradient (summed over the ranks in the backward) and use them as the population."
)
