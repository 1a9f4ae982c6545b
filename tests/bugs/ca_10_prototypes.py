"""Prototypical networks: in each episode the class prototypes are the means of the embedded support shots, and queries are classified by distance to them. Shots and queries of all episodes are dealt out over three ranks (5 shots: 2, 2, 1; 4 queries: 2, 1, 1),
the ranks' sums over shots are summed for the prototypes, and the query losses are local. Two micro-batches of episodes; gradients are summed over the ranks by accelerate.

The bug: the sums are summed with accelerator.reduce, which is not differentiable: autograd sees a copy, and each rank's support gets the gradient of its own queries only.
After reports on accelerate's gather / reduce cutting or not combining gradients in contrastive and metric losses.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
EPISODES, WAYS, SHOTS, QUERIES, FEATURES, WIDTH = 5, 3, 5, 4, 6, 4


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.log_temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.net(x)

    def query_loss(self, queries, prototypes):
        """Both (episodes, ways, ...); a query's class is its place."""
        d = (queries[:, :, :, None] - prototypes[:, None, None]).square().sum(-1)
        log_p = (-d * self.log_temperature.exp()).log_softmax(-1)
        return -torch.einsum("ewqw->", log_p) / (WAYS * QUERIES)


class SumOfShots(torch.autograd.Function):
    """The ranks' sums summed; every rank's queries use them, so the gradients are summed as well."""

    @staticmethod
    def forward(fctx, sums, group):
        fctx.group = group
        sums = sums.clone()
        dist.all_reduce(sums, group=group)
        return sums

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Embedding()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        centre = torch.randn(EPISODES, WAYS, 1, FEATURES, generator=g)
        return {
            "support": centre + torch.randn(EPISODES, WAYS, SHOTS, FEATURES, generator=g),
            "query": centre + torch.randn(EPISODES, WAYS, QUERIES, FEATURES, generator=g),
        }

    def loss_sum(self, model, rows):
        prototypes = model(rows["support"]).mean(2)
        return model.query_loss(model(rows["query"]), prototypes), len(prototypes)

    def prototypes(self, support, accelerator, ctx):
        return SumOfShots.apply(support.sum(2), ctx.group("dp")) / SHOTS

    def step(self, model, batch, ctx):
        accelerator = Accelerator(cpu=True)
        mine = {k: v.tensor_split(ctx.world_size, dim=2)[ctx.rank] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for m in range(2):
            part = {k: v.tensor_split(2)[m] for k, v in mine.items()}
            prototypes = self.prototypes(model(part["support"]), accelerator, ctx)
            loss = model.query_loss(model(part["query"]), prototypes)
            accelerator.backward(loss / EPISODES)
        for p in model.parameters():
            p.grad = accelerator.reduce(p.grad, reduction="sum")


class Buggy(Clean):
    def prototypes(self, support, accelerator, ctx):
        return accelerator.reduce(support.sum(2), reduction="sum") / SHOTS


EXPECT = dict(
    right=[
        r"reduce|collective|sum|prototype",
        r"backward|gradient|differentia|adjoint|autograd|identity|graph|detach|cotangent",
    ],
    place=[
        r"prototypes?",
        r"accelerator\.reduce|accelerate|operations\.py",
        r"support",
        r"all_reduce|all-reduce",
    ],
    wrong=[
        r"(parameters?|weights?|net\.\d).{0,30}(not reduced|never reduced|reduced twice)|missing (parameter|final) reduc",
        r"divisor|mean of means|own (count|shots)|divided by (the )?(own|wrong)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(wrong|other) rows|log_temperature.{0,30}(wrong|not)|forward .{0,20}(is wrong|differs)",
    ],
)
WHY = (
    "The prototypes hold the shots of all three ranks, and every rank's queries depend on all of them. accelerator.reduce clones the tensor and all-reduces the clone in place, outside of autograd, so that the backward is the clone's: identity. The forward is right, but each rank's own "
    "shots get the gradient of its own queries and nothing of those of the two other ranks; the net's weights are wrong on all ranks after the sum, the temperature is right. A right cause says that the gradient of the reduced prototypes is not summed over the ranks "
    "in the backward. Fix: a differentiable all-reduce, with a sum in its backward."
)
