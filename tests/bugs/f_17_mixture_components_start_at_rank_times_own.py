"""A mixture density network whose components are cut over ranks: 7 components in parts of 3, 2 and 2; the likelihood needs a
log-sum-exp over all. After FAULTS C11-06/C19-03 (uneven shards, index without the right offset): the mixing logits of a
rank are read from `rank * own` on, which is right for even parts only.
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, INPUTS, TARGETS, WIDTH, COMPONENTS = 10, 4, 2, 6, 7


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """What follows is the same on every rank."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class MixtureNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(INPUTS, 9), nn.Tanh(), nn.Linear(9, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.mixing = nn.Linear(WIDTH, COMPONENTS)
        self.means = nn.Linear(WIDTH, COMPONENTS * TARGETS)
        self.scales = nn.Linear(WIDTH, COMPONENTS * TARGETS)


def component_logp(model, x, y):
    mean = model.means(x).unflatten(-1, (-1, TARGETS))
    log_scale = 0.5 * model.scales(x).unflatten(-1, (-1, TARGETS)).tanh()
    z = (y[:, None] - mean) * (-log_scale).exp()
    return (-0.5 * z.square() - log_scale - 0.5 * math.log(2 * math.pi)).sum(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MixtureNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUTS, generator=g),
            "y": torch.randn(ROWS, TARGETS, generator=g),
            "weight": torch.randint(1, 4, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        x = model.trunk(rows["x"])
        logp = model.mixing(x).log_softmax(-1) + component_logp(model, x, rows["y"])
        return -(logp.logsumexp(-1) * rows["weight"]).sum(), rows["weight"].sum()

    def distribute(self, model, ctx):
        parts = [len(p) for p in torch.arange(COMPONENTS).tensor_split(ctx.world_size)]
        self.own, self.start = parts[ctx.rank], sum(parts[: ctx.rank])
        rows = slice(self.start * TARGETS, (self.start + self.own) * TARGETS)
        for layer in (model.means, model.scales):
            layer.weight = nn.Parameter(layer.weight.detach()[rows].clone())
            layer.bias = nn.Parameter(layer.bias.detach()[rows].clone())
        return model

    def first_component(self, ctx):
        return self.start

    def step(self, model, batch, ctx):
        x = model.trunk(batch["x"])
        first = self.first_component(ctx)
        mixing = Copied.apply(model.mixing(x).log_softmax(-1))[:, first : first + self.own]
        logp = mixing + component_logp(model, Copied.apply(x), batch["y"])
        largest = logp.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total = Summed.apply((logp - largest[:, None]).exp().sum(-1))
        loss = -((total.log() + largest) * batch["weight"]).sum()
        (loss / batch["weight"].sum()).backward()


class Buggy(Clean):
    def first_component(self, ctx):
        return ctx.rank * self.own


EXPECT = dict(
    right=[
        r"loss|mixing|component|mixture|likelihood|log.?sum|forward",
        r"wrong|differ|direction|offset|index|column|component|shard|other (rows|part|values?)|not (that|those) of|start|misalign|shift|zero|row \d|rows \d",
    ],
    place=[
        r"mixing",
        r"means|scales",
        r"ranks? \W?[12]\b|(all|every|each) ranks?",
        r"component",
        r"loss",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)|gradient is counted (twice|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(output|forward) of (the )?(trunk|mixing|means|scales)\S* (is|was) wrong",
        r"detach|no_grad",
        r"divided (twice|by)",
    ],
)
WHY = (
    "The parts begin at components 0, 3, 5; the mixing logits are read from 0, 2, 4 on ranks 0, 1, 2. Logits 2 is used for components 2 and 3, 3 for 4, 4 for 5, 5 for 6, and 6 for none. The loss and hence all gradients are wrong on all ranks, "
    "though every module's output is right; row 6 of mixing gets no gradient but that of the log-softmax."
)
