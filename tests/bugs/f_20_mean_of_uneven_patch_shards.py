"""A masked autoencoder with pooling as token mixer, patches cut over ranks (4, 3, 3), parameters under FSDP2. After FAULTS C19-05
(pytorch issue 162692: DTensor.mean with uneven sharding is the average of the shards' means).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
ROWS, PATCHES, PIXELS, WIDTH = 5, 10, 5, 7


class Total(torch.autograd.Function):
    """A sum over ranks of which each rank uses the result for its own patches."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x, mean):
        x = x + torch.tanh(self.mix(mean(self.norm1(x))))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(PIXELS, WIDTH)
        self.mask_token = nn.Parameter(0.2 * torch.randn(WIDTH))
        self.position = nn.Parameter(0.5 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, PIXELS)

    def forward(self, x, hidden, positions, mean):
        x = torch.where(hidden[..., None], self.mask_token, self.patch(x))
        x = x + self.position[positions]
        for block in self.blocks:
            x = block(x, mean)
        return self.out(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MaskedAutoencoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        slope = torch.linspace(-1, 1, PATCHES)[:, None]
        return {
            "x": torch.randn(ROWS, PATCHES, PIXELS, generator=g) + slope,
            "hidden": torch.rand(ROWS, PATCHES, generator=g) < 0.5,
        }

    @staticmethod
    def patch_loss(guess, rows):
        return ((guess - rows["x"]).square().mean(-1) * rows["hidden"]).sum()

    def loss_sum(self, model, rows):
        guess = model(
            rows["x"], rows["hidden"], torch.arange(PATCHES), lambda x: x.mean(1, keepdim=True)
        )
        return self.patch_loss(guess, rows), rows["hidden"].sum()

    def distribute(self, model, ctx):
        for part in (*model.blocks, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def mean(self, x):
        return Total.apply(x.sum(1, keepdim=True)) / PATCHES

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size, dim=1)[ctx.rank] for k, v in batch.items()}
        positions = torch.arange(PATCHES).tensor_split(ctx.world_size)[ctx.rank]
        guess = model(mine["x"], mine["hidden"], positions, self.mean)
        (self.patch_loss(guess, mine) / batch["hidden"].sum()).backward()


class Buggy(Clean):
    def mean(self, x):
        return Total.apply(x.mean(1, keepdim=True)) / dist.get_world_size()


EXPECT = dict(
    right=[
        r"mix|mean|blocks\.0|pool",
        r"forward|output|activation|input of|uneven|unequal|mean of|weight|values?",
    ],
    place=[r"blocks\.0", r"mix", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?(patch|blocks\.0\.norm1)\S* (is|was) wrong|first wrong .{0,20}(patch\b|norm1)",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own",
        r"detach|no_grad",
    ],
)
WHY = (
    "The mean over the 10 patches is the average of the means of 4, 3 and 3 patches: those of rank 0 weigh 1/12 each instead of 1/10, the others 1/9. The forward is wrong from blocks.0.mix on, on all ranks, "
    "and with it the gradients of all parameters."
)
