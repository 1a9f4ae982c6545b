"""Metric learning by triplets on 2 x 2 ranks: the tower's two layers are tensor parallel by DTensor plans (columns, rows) with a group norm over the
cut channels between them, the triplets (4 and 3) are data parallel. After the well-known slip of norms over sharded features: what
the constructor was told of the whole layer must be divided for the shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
TRIPLETS, INPUTS, WIDTH, CHANNELS, GROUPS, OUT = 7, 9, 11, 24, 6, 8


class ChannelNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(CHANNELS))
        self.bias = nn.Parameter(0.3 * torch.randn(CHANNELS))
        self.groups = GROUPS

    def forward(self, h):
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in self.parameters())
        return F.group_norm(h, self.groups, weight, bias)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.wide, self.norm = nn.Linear(WIDTH, CHANNELS), ChannelNorm()
        self.close = nn.Linear(CHANNELS, OUT)

    def forward(self, x):
        h = F.gelu(self.stem(x))
        return F.normalize(self.close(F.gelu(self.norm(self.wide(h)))), dim=-1)


def triplet_loss(model, x):
    anchor, like, unlike = model(x.flatten(0, 1)).unflatten(0, x.shape[:2]).unbind(1)
    near, far = (anchor - like).square().sum(-1), (anchor - unlike).square().sum(-1)
    return F.softplus(4 * (near - far + 0.2)).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tower()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(TRIPLETS, 3, INPUTS, generator=g)
        x[:, 1] = 0.7 * x[:, 1] + 0.7 * x[:, 0]
        return {"x": x}

    def loss_sum(self, model, rows):
        return triplet_loss(model, rows["x"]), len(rows["x"])

    def own_groups(self, tp):
        return GROUPS // tp

    def distribute(self, model, ctx):
        mesh = ctx.mesh["tp"]
        parallelize_module(model, mesh, {"wide": ColwiseParallel(), "close": RowwiseParallel()})
        for name in ("weight", "bias"):
            cut = distribute_tensor(getattr(model.norm, name).detach(), mesh, [Shard(0)])
            setattr(model.norm, name, nn.Parameter(cut))
        model.norm.groups = self.own_groups(ctx.axes["tp"])
        return model

    def step(self, model, batch, ctx):
        x = batch["x"].tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        (triplet_loss(model, x) / TRIPLETS).backward()
        for p in model.parameters():
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(grad, group=ctx.group("dp"))


class Buggy(Clean):
    def own_groups(self, tp):
        return GROUPS


EXPECT = dict(
    right=[r"norm", r"forward"],
    place=[r"norm", r"(all|every|each) rank|ranks? 0|rank"],
    wrong=[
        r"goes wrong in `?(stem|wide|close)\b",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(own|local) (count|denominator|divisor)",
        r"backward of (the )?`?norm`? is wrong",
        r"ranks? that hold different parts",
    ],
)
WHY = (
    "Each tensor rank holds 12 of 24 channels and normalises them in 6 groups of 2, where the whole layer has 6 groups of 4, so 3 for a shard. "
    "`stem` and `wide` are right in the forward, the output of `norm` is the first wrong value, on all four ranks and in all rows; all that follows, "
    "and every gradient, is wrong. Plans, reductions and the divisor are right."
)
