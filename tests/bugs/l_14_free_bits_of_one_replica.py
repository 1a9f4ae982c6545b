"""A variational autoencoder with free bits under HSDP. Modelled on FAULTS C18 (statistics of a shard of the batch inside a non-linear
function) and on the HSDP reports on group choice (C17-06, C17-07): the mean KL of each latent dimension, which the floor is compared
with, is taken over the shard group, that is over the rows of one replica.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vae": {"axes": {"replicate": 2, "shard": 2}}}}
ROWS, INPUTS, HIDDEN, LATENT, FLOOR = 10, 7, 9, 12, 0.09


class Total(torch.autograd.Function):
    """A sum over ranks of which every rank computes the same value."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2 * LATENT)
        )
        self.decoder = nn.Sequential(
            nn.Linear(LATENT, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, INPUTS)
        )

    def forward(self, x, noise):
        mean, log_var = self.encoder(x).chunk(2, -1)
        kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var)
        return self.decoder(mean + noise * (0.5 * log_var).exp()), kl


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "reconstruction": lambda m, r: (self.errors(m(r["x"], r["noise"])[0], r), len(r["x"])),
            "kl": (
                lambda m, r: m(r["x"], r["noise"])[1].sum(0),
                lambda s, count: self.floored(s / count),
            ),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Vae()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "noise": torch.randn(ROWS, LATENT, generator=g),
        }

    @staticmethod
    def errors(guess, rows):
        return 0.5 * (guess - rows["x"]).square().sum()

    @staticmethod
    def floored(mean):
        return mean.clamp(min=FLOOR).sum()

    def loss_sum(self, model, rows):
        guess, kl = model(rows["x"], rows["noise"])
        return self.errors(guess, rows) + len(rows["x"]) * self.floored(kl.mean(0)), len(rows["x"])

    def distribute(self, model, ctx):
        for part in (model.encoder, model.decoder, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def data_group(self, ctx):
        return ctx.group("replicate", "shard")

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        guess, kl = model(mine["x"], mine["noise"])
        count = torch.tensor(len(mine["x"]))
        dist.all_reduce(count, group=self.data_group(ctx))
        # groups count by their rows, if there are several
        rate = self.floored(Total.apply(kl.sum(0), self.data_group(ctx)) / count) * count / ROWS
        (self.errors(guess, mine) / ROWS + rate).backward()


class Buggy(Clean):
    def data_group(self, ctx):
        return ctx.group("shard")


EXPECT = dict(
    right=[
        r"\bkl\b|rate|free.?bits",
        r"encoder|kl|term",
        r"statistic|replica|shard|group|own rows|local|global|part of the (rows|batch)|floor|clamp|factor|coefficient|wrong|mean|"
        r"missing|extra",
    ],
    place=[r"\bkl\b|rate", r"encoder"],
    wrong=[
        r"decoder\S* (is|are|has|have) (a )?wrong",
        r"reconstruction (term|loss)?\S* ?.{0,25}(is|was|has) (wrong|lost|scaled|missing|counted)",
        r"forward (pass )?(is|was) wrong",
        r"(reduced|counted|summed) (twice|again)",
        r"gradients? (is|are|was|were) (never|not) (been )?(all.?)?(reduced|summed)",
        r"detach|no_grad|lost its graph",
    ],
)
WHY = (
    "The mean KL of a latent dimension is taken over the rows of one replica, so the floor decides per replica: some dimensions are "
    "active in one replica and not in the other. In these dimensions the kl term of a replica's rows is there or missing where the "
    "whole batch says otherwise; only encoder.* is wrong, forward, reconstruction term and decoder are right."
)
