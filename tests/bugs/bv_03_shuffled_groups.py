"""A ShuffleNet-like net of pointwise group convolutions whose three groups live on three tensor-parallel ranks. Between two group convolutions the twelve channels are shuffled across the groups: gathered,
viewed as (groups, channels per group), transposed, and every rank keeps its four. An autograd Function (memory-efficient, nothing saved) does it; the head is row parallel. Two micro-batches.

The bug: the backward shuffles the gathered gradient with the same number of groups once more, where the inverse of a shuffle with g groups is one with C / g groups (4, not 3). It is the well-known slip in
hand-written channel shuffles (right by accident where C = g * g), as in memory-efficient ShuffleNet/CondenseNet forks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ROWS, FEATURES, SITES, CHANNELS, GROUPS = 5, 5, 4, 12, 3


def shuffle(x, groups):
    """x: (batch, channels, sites)"""
    b, c, s = x.shape
    return x.view(b, groups, c // groups, s).transpose(1, 2).reshape(b, c, s)


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(GROUPS)]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


class ChannelShuffle(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, rank, group):
        fctx.rank, fctx.group = rank, group
        return shuffle(gathered(x, group), GROUPS).chunk(GROUPS, 1)[rank].contiguous()

    @staticmethod
    def backward(fctx, grad):
        full = shuffle(gathered(grad, fctx.group), CHANNELS // GROUPS)
        return full.chunk(GROUPS, 1)[fctx.rank].contiguous(), None, None


class GroupShuffle(ChannelShuffle):
    @staticmethod
    def backward(fctx, grad):
        full = shuffle(gathered(grad, fctx.group), GROUPS)
        return full.chunk(GROUPS, 1)[fctx.rank].contiguous(), None, None


class SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(FEATURES, CHANNELS, 1)
        self.conv1 = nn.Conv1d(CHANNELS, CHANNELS, 1, groups=GROUPS)
        self.conv2 = nn.Conv1d(CHANNELS, CHANNELS, 1, groups=GROUPS)
        self.conv3 = nn.Conv1d(CHANNELS, CHANNELS, 1, groups=GROUPS)
        self.head = nn.Linear(CHANNELS, 2)

    def forward(self, x):
        h = F.silu(self.stem(x))
        h = shuffle(F.silu(self.conv1(h)), GROUPS)
        h = shuffle(F.silu(self.conv2(h)), GROUPS)
        return self.head(F.silu(self.conv3(h)).mean(-1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, SITES, generator=g),
            "y": torch.randn(ROWS, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["y"])

    def distribute(self, model, ctx):
        r = ctx.coords["tp"]
        for layer in (model.stem, model.conv1, model.conv2, model.conv3):
            layer.weight = nn.Parameter(layer.weight.data.chunk(GROUPS, 0)[r].clone())
            layer.bias = nn.Parameter(layer.bias.data.chunk(GROUPS, 0)[r].clone())
        model.head.weight = nn.Parameter(model.head.weight.data.chunk(GROUPS, 1)[r].clone())
        return model

    def across_groups(self, h, ctx):
        return ChannelShuffle.apply(h, ctx.coords["tp"], ctx.group("tp"))

    def predict(self, model, x, ctx):
        h = F.silu(F.conv1d(x, model.stem.weight, model.stem.bias))
        h = self.across_groups(F.silu(F.conv1d(h, model.conv1.weight, model.conv1.bias)), ctx)
        h = self.across_groups(F.silu(F.conv1d(h, model.conv2.weight, model.conv2.bias)), ctx)
        h = F.silu(F.conv1d(h, model.conv3.weight, model.conv3.bias)).mean(-1)
        return SumPartial.apply(h @ model.head.weight.t(), ctx.group("tp")) + model.head.bias

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            error = self.predict(model, part["x"], ctx) - part["y"]
            (error.square().sum() / ROWS).backward()


class Buggy(Clean):
    def across_groups(self, h, ctx):
        return GroupShuffle.apply(h, ctx.coords["tp"], ctx.group("tp"))


EXPECT = dict(
    right=[
        r"shuffl|permut|order|channel|inverse|transpos|position|place|adjoint|rearrang|swapp",
        r"backward|gradient|adjoint|way back|cotangent",
        r"shuffl|permut|invers|order|transpos|same (number of )?groups|wrong (place|position|channel|rank|element)|other (place|position|channel|rank|element)|misplaced|swapped|rearrang|not the adjoint",
    ],
    place=[
        r"GroupShuffle",
        r"shuffle",
        r"across_groups",
        r"all.?gather.{0,80}backward|backward.{0,80}all.?gather|backward.{0,60}gathered",
    ],
    wrong=[
        r"(sum|reduc|all.?reduce).{0,40}missing|missing.{0,40}(sum|reduc)|not (summed|reduced)",
        r"counted|times too|factor of|divisor|mean of means|averag",
        r"forward .{0,20}(is )?wrong|SumPartial.{0,60}(wrong|missing)|micro.?batch(es)? .{0,30}(lost|dropped|overwritten)",
    ],
)
WHY = (
    "The shuffle with three groups of twelve channels is undone by a shuffle with four groups; GroupShuffle's backward applies the one with three groups again, so that each channel's gradient arrives at another "
    "channel, partly on another rank. Forward and loss are right, as are conv3 and the head; conv2 gets gradients of permuted channels, conv1 and stem twice over, on all three ranks and in both micro-batches. "
    "A right cause says that the backward of the channel shuffle is not the inverse permutation. Fix: shuffle(grad, CHANNELS // GROUPS)."
)
