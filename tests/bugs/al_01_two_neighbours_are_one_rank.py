"""A periodic one-dimensional convolution net (a ring of longitudes) cut into two halves (sp 2) times two data parallel replicas (dp 2, rows 3 and 2, micro-batches of one or two rows). Every convolution first exchanges halos of two points
with the left and the right neighbour by isend / irecv; the own backward of the exchange sends the halos' gradients back and adds them to the edges they were copied from.

The bug: the backward posts its messages without tags, "to the left, to the right, from the left, from the right". With two ranks on a periodic axis left and right neighbour are the same rank, messages of one pair match in the order of
posting, and what was meant for the right edge is added to the left edge and the other way round. As in CliMA/Oceananigans.jl issue 5843 and PR 5859 (west and east halo swapped on 2-rank periodic axes), compare open-mpi/ompi PR 7063.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 2}}}}
ROWS, LENGTH, WIDTH, HALO = 5, 14, 4, 2
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 5)]]


def exchange(to_left, to_right, group, tags):
    """Hands to_left and to_right to the neighbours; returns (from the left, from the right)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    left = dist.get_global_rank(group, (rank - 1) % size)
    right = dist.get_global_rank(group, (rank + 1) % size)
    from_left, from_right = torch.empty_like(to_right), torch.empty_like(to_left)
    leftwards, rightwards = tags
    works = [
        dist.isend(to_left, left, group=group, tag=leftwards),
        dist.isend(to_right, right, group=group, tag=rightwards),
        dist.irecv(from_left, left, group=group, tag=rightwards),
        dist.irecv(from_right, right, group=group, tag=leftwards),
    ]
    for work in works:
        work.wait()
    return from_left, from_right


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, tags):
        ctx.group, ctx.tags = group, tags
        left, right = exchange(
            x[..., :HALO].contiguous(), x[..., -HALO:].contiguous(), group, (1, 2)
        )
        return torch.cat([left, x, right], -1)

    @staticmethod
    def backward(ctx, grad):
        left, right = exchange(
            grad[..., :HALO].contiguous(), grad[..., -HALO:].contiguous(), ctx.group, ctx.tags
        )
        inner = grad[..., HALO:-HALO].clone()
        inner[..., :HALO] += left
        inner[..., -HALO:] += right
        return inner, None, None


class Ring(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.convolution = nn.Conv1d(inputs, outputs, 2 * HALO + 1)
        self.group, self.tags = None, (1, 2)

    def forward(self, x):
        if self.group is None:
            x = F.pad(x, (HALO, HALO), mode="circular")
        else:
            x = Halo.apply(x, self.group, self.tags)
        return self.convolution(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(2, WIDTH, 1)
        self.first, self.second = Ring(WIDTH, WIDTH), Ring(WIDTH, WIDTH)
        self.out = nn.Conv1d(WIDTH, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        x = x + torch.tanh(self.first(x))
        return self.out(x + torch.tanh(self.second(x)))


class Clean:
    tags = (1, 2)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "state": torch.randn(ROWS, 2, LENGTH, generator=g),
            "next": torch.randn(ROWS, 1, LENGTH, generator=g),
        }

    def loss_sum(self, model, rows):
        error = model(rows["state"]) - rows["next"]
        return error.square().sum(), error.numel()

    def distribute(self, model, ctx):
        for ring in (model.first, model.second):
            ring.group, ring.tags = ctx.group("sp"), self.tags
        return model

    def step(self, model, batch, ctx):
        size = LENGTH // dist.get_world_size(ctx.group("sp"))
        start = dist.get_rank(ctx.group("sp")) * size
        for low, high in PARTS[dist.get_rank(ctx.group("dp"))]:
            state = batch["state"][low:high, :, start : start + size]
            error = model(state) - batch["next"][low:high, :, start : start + size]
            (error.square().sum() / (ROWS * LENGTH)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)


class Buggy(Clean):
    tags = (0, 0)


EXPECT = dict(
    right=[
        r"(?i)halo|exchange|edge|border|neighbou?r|first|second|Ring",
        r"(?i)backward|adjoint|gradient (of|that|for|sent|going|to)|hands? (back|on)|way back",
    ],
    place=[r"(?i)halo|exchange|\bfirst\b|\bsecond\b|Ring|edge|neighbou?r"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)out\.(weight|bias) (is|are) wrong|second\.convolution\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone|detach",
        r"(?i)(other|wrong) (rows?|labels?|targets?)",
    ],
)
WHY = (
    "The forward is right on all four ranks (its messages carry tags 1 and 2). In the backward of Halo, of both Ring layers, all messages have tag 0: each rank sends first the gradient of its left halo (which belongs to the peer's "
    "right edge), then that of its right halo (the peer's left edge); the peer's first receive is the one 'from the left', added to its left edge. So the two points of halo gradient meant for the right edge are added to the left "
    "edge of the half, and the other way round: points 0, 1 and 5, 6 of the seven local points, all ranks, rows and micro-batches. Wrong, in direction, are the gradients below an exchange: lift and first.convolution (through the "
    "halo backward of second), lift also through that of first. second.convolution and out are right, since nothing above them goes through a halo backward. The forward, divisor 70, rows, and the sum over all four ranks are right. "
    "With three or more ranks on sp the code would be right. Fix: tags by direction, or post the receives in the opposite order."
)
