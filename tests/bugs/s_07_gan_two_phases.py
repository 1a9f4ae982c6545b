"""A GAN in data parallelism of three (3, 2 and 2 rows): the discriminator's phase with its reduction, then the generator's phase through the
discriminator, which must not learn from it. After the DCGAN-like loops in which freezing the discriminator or a second zero_grad is left out.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LATENT, SIDE, WIDTH = 7, 5, 8, 4


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread = nn.Linear(LATENT, WIDTH * 16)
        self.grow = nn.ConvTranspose2d(WIDTH, WIDTH, 4, stride=2, padding=1)
        self.paint = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, z):
        h = F.gelu(self.spread(z)).unflatten(1, (WIDTH, 4, 4))
        return torch.tanh(self.paint(F.gelu(self.grow(h))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Conv2d(1, WIDTH, 4, stride=2, padding=1)
        self.look = nn.Conv2d(WIDTH, WIDTH + 2, 3, stride=2, padding=1)
        self.judge = nn.Linear((WIDTH + 2) * 4, 1)

    def forward(self, x):
        h = F.leaky_relu(self.see(x), 0.2)
        return self.judge(F.leaky_relu(self.look(h), 0.2).flatten(1)).squeeze(1)


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = Generator(), Critic()


def critic_loss(judge, real, fake):
    return (F.softplus(-judge(real)) + F.softplus(judge(fake.detach()))).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Both()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "real": torch.randn(ROWS, 1, SIDE, SIDE, generator=g).tanh(),
            "z": torch.randn(ROWS, LATENT, generator=g),
        }

    def loss_sum(self, model, rows):
        fake = model.g(rows["z"])
        still = {k: v.detach() for k, v in model.d.named_parameters()}
        fooled = F.softplus(-functional_call(model.d, still, (fake,))).sum()
        return critic_loss(model.d, rows["real"], fake) + fooled, len(rows["z"])

    def learn(self, module, flag):
        module.requires_grad_(flag)

    def reduce(self, module, group):
        for p in module.parameters():
            dist.all_reduce(p.grad, group=group)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        rows = {k: v.tensor_split(n)[me] for k, v in batch.items()}
        fake = model.g(rows["z"])
        (critic_loss(model.d, rows["real"], fake) / ROWS).backward()
        self.reduce(model.d, group)
        self.learn(model.d, False)
        (F.softplus(-model.d(fake)).sum() / ROWS).backward()
        self.learn(model.d, True)
        self.reduce(model.g, group)


class Buggy(Clean):
    def learn(self, module, flag):
        pass


EXPECT = dict(
    right=[
        r"\bd\.|critic|discriminator|see|look|judge",
        r"backward|late|after|another|second|term|no part|stay|more than|added",
    ],
    place=[r"\bd\.|critic|see|look|judge", r"rank"],
    wrong=[
        r"\bg\.(spread|grow|paint)\S* (is|are) wrong",
        r"forward is (wrong|right up to)|forward goes wrong",
        r"(own|local) (count|denominator|divisor)",
        r"(reduced|summed) (twice|again|\d times)",
        r"rows? (are |is )?(read twice|never read)",
    ],
)
WHY = (
    "The discriminator is not frozen in the generator's phase, so the second backward adds the gradient of the generator's loss to the "
    "discriminator's .grad, which were reduced already: each rank holds the right sum plus its own rows' part of another loss, and so another "
    "gradient on each rank. Generator, forwards, the first backward and its reduction are right."
)
