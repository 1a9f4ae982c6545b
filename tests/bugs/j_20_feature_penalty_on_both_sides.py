"""Encoder and head on pools of three and two ranks; features go one way, their gradients the other. After FAULTS C03-08 (Megatron-Bridge PR
4066: encoder and language model on separate pools) and C10 (auxiliary losses that are scaled twice): the penalty on the features is
computed by the encoder ranks and, since it moved to the head's loss, there as well.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"encoder": {"axes": {"dp": 3}}, "head": {"axes": {"dp": 2}}}}
ROWS, SIDE, WIDTH, CLASSES, PENALTY = 11, 5, 6, 5, 0.15


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.out(F.silu(self.norm(self.conv(x))).mean((2, 3)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(WIDTH, 9), nn.SiLU(), nn.Linear(9, CLASSES))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "task": lambda m, r: (self.task(m, m.encoder(r["x"]), r["y"]), len(r["y"])),
            "penalty": lambda m, r: (self.penalty(m.encoder(r["x"])), len(r["y"])),
        }

    def build(self):
        torch.manual_seed(self.seed)
        model = Model()
        model.encoder.out.weight.data.mul_(3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    @staticmethod
    def task(model, features, y):
        return F.cross_entropy(model.head(features), y, reduction="sum")

    @staticmethod
    def penalty(features):
        return PENALTY * features.square().sum()

    def loss_sum(self, model, rows):
        features = model.encoder(rows["x"])
        return self.task(model, features, rows["y"]) + self.penalty(features), len(rows["y"])

    def distribute(self, model, ctx):
        delattr(model, "head" if ctx.pool == "encoder" else "encoder")
        return model

    def head_loss(self, model, features, y):
        return self.task(model, features, y)

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        shared = torch.zeros(ROWS, WIDTH, dtype=ctx.dtype)
        if ctx.pool == "encoder":
            features = model.encoder(batch["x"][own])
            shared[own] = features.detach()
        dist.all_reduce(shared)
        back = torch.zeros_like(shared)
        if ctx.pool == "head":
            leaf = shared[own].requires_grad_()
            (self.head_loss(model, leaf, batch["y"][own]) / ROWS).backward()
            back[own] = leaf.grad
        dist.all_reduce(back)
        if ctx.pool == "encoder":
            penalty = self.penalty(features) / ROWS
            torch.autograd.backward([features, penalty], [back[own], None])
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def head_loss(self, model, features, y):
        return self.task(model, features, y) + self.penalty(features)


EXPECT = dict(
    right=[
        r"penalty",
        r"twice|\b2\b|two times|double|too (large|much)|again|once more|more than once",
    ],
    place=[r"encoder", r"penalty"],
    wrong=[
        r"head\.\d\S* (is|are|has|have) (a )?wrong",
        r"task (term|loss)?\S* ?(is|has) (a )?(wrong|scaled|missing|twice)",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"mean of (the )?means",
        r"forward (pass )?(is|was) wrong",
        r"(all|every) parameters? (is|are) wrong",
    ],
)
WHY = (
    "The gradient that comes back from the head pool already contains the penalty on the features, and the encoder ranks add their "
    "own: the penalty term counts twice on encoder.*, on ranks 0-2. The task term and the head on ranks 3 and 4 are right."
)
