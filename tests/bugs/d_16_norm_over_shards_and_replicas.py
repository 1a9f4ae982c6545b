"""HSDP through fully_shard on two axes, clipped by a norm of the local shards. After FAULTS C17-06
(VeOmni PR 862): the squared norm is reduced over shard x replicate.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"replicate": 2, "shard": 2}}}}

ROWS, LENGTH, INPUTS, WIDTH = 10, 6, 5, 9


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 13), nn.Linear(WIDTH, 13, bias=False)
        self.down = nn.Linear(13, WIDTH)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(INPUTS, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.stem(x.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    after, max_norm = "clip", 0.1
    norm_axes = ("shard",)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Regressor()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, LENGTH, INPUTS, generator=g),
            "y": torch.randn(ROWS, LENGTH, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.smooth_l1_loss(model(rows["x"]), rows["y"], reduction="sum")
        return loss, rows["y"].numel()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def step(self, model, batch, ctx):
        at = ctx.coords["replicate"] * ctx.axes["shard"] + ctx.coords["shard"]
        ranks = ctx.axes["replicate"] * ctx.axes["shard"]
        mine = {k: v.tensor_split(ranks)[at] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / batch["y"].numel()).backward()
        grads = [param.grad.to_local() for param in model.parameters()]
        squared = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(squared, group=ctx.group(*self.norm_axes))
        factor = (self.max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)


class Buggy(Clean):
    norm_axes = ("replicate", "shard")


EXPECT = dict(
    right=[
        r"norm|clip",
        r"replica|twice|1\.41|sqrt|0\.707|too large|counted|2 times|two times|wrong|other norm|both axes|clipped by",
    ],
    place=[r"norm", r"replica", r"(every|all|each) (param|gradient|rank|tensor)", r"ranks?"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc|not reduced over",
        r"norm is too small",
        r"own (shard'?s? )?norm|each rank clips by (its|an) own",
        r"\bforward (is )?wrong|first wrong forward|forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "The squared norm is summed over both axes, so every shard counts once per replica: the norm is "
    "sqrt(2) too large and all gradients are clipped to 0.707 of what they should be."
)
