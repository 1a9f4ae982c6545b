"""The critic's turn of a hinge GAN with spectral normalisation under DDP of two, three micro-batches (no_sync). One power iteration is done
per update, between the steps, so within a step the norms are fixed. After reports on spectral norm with gradient accumulation: the critic
is switched to training mode for the step, and every forward moves its vectors on.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LATENT, SIDE, MICRO = 9, 5, 6, 3


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.edges = spectral_norm(nn.Conv2d(2, 6, 3, padding=1))
        self.parts = spectral_norm(nn.Conv2d(6, 8, 3, stride=2, padding=1))
        self.head = spectral_norm(nn.Linear(8 * 9, 1, bias=False))

    def forward(self, x):
        x = F.leaky_relu(self.parts(F.leaky_relu(self.edges(x), 0.2)), 0.2)
        return self.head(x.flatten(1))[:, 0]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = Critic()
        self.generator = nn.Sequential(
            nn.Linear(LATENT, 20), nn.ReLU(), nn.Linear(20, 2 * SIDE * SIDE)
        )
        self.generator.requires_grad_(False)

    def forward(self, x, z):
        """Scores of the real and of the made images."""
        made = self.generator(z).tanh().view(-1, 2, SIDE, SIDE)
        return self.critic(torch.cat([x, made])).chunk(2)


def hinge(real, made):
    return ((1 - real).relu() + (1 + made).relu()).sum()


class Clean:
    training = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        pair = Pair()
        with torch.no_grad():  # some updates since the vectors were made
            for name, p in pair.critic.named_parameters():
                if name.endswith("original"):
                    p.add_(torch.randn_like(p) * p.std())
        return pair.eval()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 2, SIDE, SIDE, generator=g).cumsum(2).tanh(),
            "z": torch.randn(ROWS, LATENT, generator=g),
        }

    def loss_sum(self, model, rows):
        return hinge(*model(rows["x"], rows["z"])), len(rows["x"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(
            model, process_group=ctx.group("dp"), broadcast_buffers=False
        )

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        model.train(self.training)
        for i, at in enumerate(torch.arange(ROWS).tensor_split(n)[me].tensor_split(MICRO)):
            with contextlib.nullcontext() if i == MICRO - 1 else model.no_sync():
                (hinge(*model(batch["x"][at], batch["z"][at])) * n / ROWS).backward()


class Buggy(Clean):
    training = True


EXPECT = dict(
    right=[
        r"forward|weight|output|state|buffer|_u\b|_v\b|parametri|again|norm",
        r"edges|parts|head|critic|parametri",
    ],
    place=[r"edges|parts|critic|parametri"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"own (count|denominator|divisor)",
        r"forward .{0,40}right in (every|all)",
        r"generator\S* .{0,20}(is|goes) wrong",
        r"rows? .{0,20}(read|seen) (twice|never)",
        r"dropout|random numbers",
    ],
)
WHY = (
    "The step runs the critic in training mode, where spectral_norm does a power iteration in each forward: the vectors _u and _v, and with them "
    "the weights that `edges`, `parts` and `head` compute with, are others in every micro-batch, on both ranks alike, and never those of the "
    "step's beginning. The forward is wrong from `edges` on, all gradients of the critic are wrong; divisor and reduction are right."
)
