"""A critic with a gradient penalty on interpolated inputs (WGAN-GP), gradients summed by hand.
After reports on ports to distributed wrappers: the inner gradient is taken without create_graph."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, INPUTS, LAMBDA = 10, 12, 5, 2.0


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.mid, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = F.softplus(self.stem(x))
        return self.out(torch.tanh(self.mid(x)))[:, 0]


class Clean:
    create_graph = True

    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"wasserstein": self.wasserstein, "penalty": self.penalty}

    def build(self):
        torch.manual_seed(self.seed)
        return Critic()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "real": torch.randn(ROWS, INPUTS, generator=g) + 1,
            "fake": torch.randn(ROWS, INPUTS, generator=g),
            "mix": torch.rand(ROWS, 1, generator=g),
        }

    @staticmethod
    def wasserstein(model, rows):
        return (model(rows["fake"]) - model(rows["real"])).sum(), len(rows["real"])

    @staticmethod
    def penalty_of(model, rows, create_graph):
        x = rows["mix"] * rows["real"] + (1 - rows["mix"]) * rows["fake"]
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
        size = (slope.square().sum(-1) + 1e-6).sqrt()
        return LAMBDA * (size - 1).square().sum(), len(x)

    def penalty(self, model, rows):
        return self.penalty_of(model, rows, True)

    def loss_sum(self, model, rows):
        return self.wasserstein(model, rows)[0] + self.penalty(model, rows)[0], len(rows["real"])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss = self.wasserstein(model, mine)[0] + self.penalty_of(model, mine, self.create_graph)[0]
        (loss / ROWS).backward()
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad)


class Buggy(Clean):
    create_graph = False


EXPECT = dict(
    right=[
        r"penalty",
        r"missing|lost|no gradient|absent|0 times|times 0|not (in|part)|without|dropped|left out"
        r"|only.*wasserstein|detach|zero|factor 0|does not reach",
    ],
    place=[r"penalty"],
    wrong=[r"never reduced|not reduced|missing reduction", r"averag", r"counted (twice|3 times)"],
)
WHY = (
    "The slope is computed without create_graph, so it is a constant to the backward: its "
    "gradient is missing from all weights, the rest is right."
)
