"""A small convolution network that reads landmarks off a picture (7 x 5): two convolutions, then a
linear head on the flattened map (4 channels x 7 x 5). Rows over dp (2); the picture is cut into
three strips (3, 2, 2 lines) over sp, with a halo of one line. Every rank multiplies its strip by
its columns of the head, and the results are summed over sp. Two micro-batches.

Bug: a strip's columns are taken as one piece of the head's weight, as if lines were the slowest
index of the flattened map. After strip-parallel classifiers whose flatten is channels first.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "sp": 3}}}}
ROWS, HIGH, WIDE, CHANNELS, MARKS = 5, 7, 5, 4, 3


class Halo(torch.autograd.Function):
    """The strip with a line of its neighbours above and below, zero beyond the picture."""

    @staticmethod
    def forward(ctx, strip, lo, group):
        ctx.lo, ctx.group = lo, group
        lines = strip.shape[2]
        full = strip.new_zeros(*strip.shape[:2], HIGH + 2, strip.shape[3])
        full[:, :, lo + 1 : lo + 1 + lines] = strip
        dist.all_reduce(full, group=group)
        return full[:, :, lo : lo + lines + 2].clone()

    @staticmethod
    def backward(ctx, g):
        lo, lines = ctx.lo, g.shape[2] - 2
        full = g.new_zeros(*g.shape[:2], HIGH + 2, g.shape[3])
        full[:, :, lo : lo + lines + 2] = g
        dist.all_reduce(full, group=ctx.group)
        return full[:, :, lo + 1 : lo + 1 + lines].clone(), None, None


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class Strip:
    def __init__(self, ctx):
        self.group = ctx.group("sp")
        self.lines = torch.arange(HIGH).tensor_split(ctx.axes["sp"])[ctx.coords["sp"]]
        self.lo, self.hi = int(self.lines[0]), int(self.lines[-1]) + 1

    def convolve(self, conv, x):
        return F.conv2d(Halo.apply(x, self.lo, self.group), conv.weight, conv.bias, padding=(0, 1))

    def columns(self, weight):
        weight = weight.view(weight.shape[0], CHANNELS, HIGH, WIDE)
        return weight[:, :, self.lo : self.hi].flatten(1)

    def read(self, head, x):
        part = F.linear(x.flatten(1), self.columns(head.weight))
        return Gathered.apply(part, self.group) + head.bias


class StripOfColumns(Strip):
    def columns(self, weight):
        line = CHANNELS * WIDE
        return weight[:, self.lo * line : self.hi * line]


class Landmarks(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Conv2d(2, 6, 3, padding=1)
        self.far = nn.Conv2d(6, CHANNELS, 3, padding=1)
        self.head = nn.Linear(CHANNELS * HIGH * WIDE, 2 * MARKS)
        self.strip = None

    def forward(self, x):
        if self.strip is None:
            return self.head(torch.tanh(self.far(F.gelu(self.near(x)))).flatten(1))
        h = F.gelu(self.strip.convolve(self.near, x))
        h = torch.tanh(self.strip.convolve(self.far, h))
        return self.strip.read(self.head, h)


class Clean:
    strip = Strip

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        return Landmarks()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 810)
        return {
            "picture": torch.randn(ROWS, 2, HIGH, WIDE, generator=g),
            "marks": torch.randn(ROWS, 2 * MARKS, generator=g),
        }

    def loss_sum(self, model, rows):
        marks = model(rows["picture"])
        return F.smooth_l1_loss(marks, rows["marks"], reduction="sum", beta=0.5), marks.shape[0]

    def distribute(self, model, ctx):
        model.strip = self.strip(ctx)
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.tensor_split(2):
            rows = {k: v[part] for k, v in batch.items()}
            rows["picture"] = rows["picture"][:, :, model.strip.lines]
            loss, _ = self.loss_sum(model, rows)
            (loss / ROWS).backward()
        for name, p in model.named_parameters():
            if name != "head.bias":
                dist.all_reduce(p.grad, group=ctx.group("sp"))
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    strip = StripOfColumns


EXPECT = dict(
    right=[
        r"head|columns|linear|weight",
        r"column|slice|cut|layout|order|flatten|index|permut|contiguous|block|piece|StripOfColumns",
        r"channel|\blines?\b|height|layout|order|permut|interleav|strid|StripOfColumns|"
        r"(other|wrong|different).{0,30}columns?|columns?.{0,60}(other|wrong|not (fit|match))",
    ],
    place=[
        r"StripOfColumns",
        r"\bcolumns\b",
        r"self\.lo \* line",
        r"\bread\b",
        r"head\.weight",
        r"model\.strip|self\.strip",
    ],
    wrong=[
        r"halo.{0,40}(wrong|missing|detached|corner)",
        r"head\.bias.{0,40}(twice|times|not reduced|missing)",
        r"Gathered.{0,40}(backward|adjoint).{0,20}(wrong|miss)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """The map is flattened as channel, line, column, so the columns of the head's weight that
belong to a strip are CHANNELS separate pieces: view(out, C, H, W)[:, :, lo:hi]. StripOfColumns
takes one piece lo * C * W : hi * C * W of the same size, which multiplies the strip's values by
weights of other channels and lines. Every gradient is wrong, head.weight sits in the wrong columns.
Halo, sums and bias are right. Fix: cut along the line index of the viewed weight."""
