"""Segmentation with spatial parallelism on a 2 x 2 grid of ranks: images of 7 x 9 are cut into tiles (4 or 3 rows by 5 or 4 columns), every 3 x 3 convolution gets a halo of one pixel from the neighbours above or below and left
or right. Two micro-batches; every rank has the loss of its own pixels.

The bug: rows and columns are exchanged at once, both from the bare tile, so the corner pixels of the halo, which belong to the diagonal neighbour, stay zero. They would come along if the columns were taken from the tile
already widened by the rows. As in nextsimhub/nextsimdg PR 1005 (halo exchange only exchanged edges, corner neighbours added).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"high": 2, "wide": 2}}}}
ROWS, SIDES, CHANNELS, WIDTH, CLASSES = 3, (7, 9), 2, 4, 3
CUTS = [[(0, 4), (4, 7)], [(0, 5), (5, 9)]]


class Halo(torch.autograd.Function):
    """One line from the other rank of a pair along dim, zeros on the outer side."""

    @staticmethod
    def swap(line, group):
        both = line.new_zeros(2, *line.shape)
        both[dist.get_rank(group)] = line
        dist.all_reduce(both, group=group)
        return both[1 - dist.get_rank(group)]

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group, first = dim, group, dist.get_rank(group) == 0
        edge = x.narrow(dim, x.shape[dim] - 1 if first else 0, 1)
        got = Halo.swap(edge, group)
        nothing = torch.zeros_like(got)
        return torch.cat([nothing, x, got] if first else [got, x, nothing], dim)

    @staticmethod
    def backward(ctx, grad):
        dim, first = ctx.dim, dist.get_rank(ctx.group) == 0
        size = grad.shape[dim]
        back = Halo.swap(grad.narrow(dim, size - 1 if first else 0, 1), ctx.group)
        grad = grad.narrow(dim, 1, size - 2).clone()
        grad.narrow(dim, size - 3 if first else 0, 1).add_(back)
        return grad, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, WIDTH, 3)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3)
        self.third = nn.Conv2d(WIDTH, WIDTH, 3)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)
        self.groups, self.at_once = None, False

    def widen(self, x):
        if self.groups is None:
            return F.pad(x, (1, 1, 1, 1))
        high, wide = self.groups
        rows = Halo.apply(x, 2, high)
        if not self.at_once:
            return Halo.apply(rows, 3, wide)
        columns = F.pad(Halo.apply(x, 3, wide), (0, 0, 1, 1))
        return torch.cat([columns[..., :1], rows, columns[..., -1:]], 3)

    def forward(self, x):
        x = F.silu(self.first(self.widen(x)))
        x = x + F.silu(self.second(self.widen(x)))
        x = x + F.silu(self.third(self.widen(x)))
        return self.head(x)


class Clean:
    at_once = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, CHANNELS, *SIDES, generator=g),
            "label": torch.randint(CLASSES, (ROWS, *SIDES), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["image"]), rows["label"], reduction="sum")
        return loss, rows["label"].numel()

    def distribute(self, model, ctx):
        model.groups, model.at_once = (ctx.group("high"), ctx.group("wide")), self.at_once
        return model

    def step(self, model, batch, ctx):
        a, b = (
            slice(*cut[dist.get_rank(group)])
            for cut, group in zip(CUTS, (ctx.group("high"), ctx.group("wide")))
        )
        for part in torch.arange(ROWS).split(2):
            logits = model(batch["image"][part][:, :, a, b])
            loss = F.cross_entropy(logits, batch["label"][part][:, a, b], reduction="sum")
            (loss / batch["label"].numel()).backward()
        for p in model.parameters():
            for axis in ("high", "wide"):
                dist.all_reduce(p.grad, group=ctx.group(axis))


class Buggy(Clean):
    at_once = True


EXPECT = dict(
    right=[
        r"(?i)forward|input|halo|corner|neighbo|border|boundar|diagonal|edge|pad",
        r"(?i)first|second|third|conv|halo|widen|tile",
        r"(?i)corner|diagonal|halo|border|boundar|edge|forward|miss|zero|empty|differ|other|wrong",
    ],
    place=[r"(?i)halo|widen|first|conv|corner"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward|backward of .{0,20}Halo.{0,20}wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|"
        r"counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|head.{0,20}goes wrong",
    ],
)
WHY = (
    "On every rank, in every 3 x 3 convolution and every micro-batch, the one corner pixel of the halo that belongs to the diagonal neighbour (rank 0: lower right, from rank 3; rank 1: lower left, rank 2; rank 2: upper right; "
    "rank 3: upper left) is zero instead of the neighbour's pixel. The forward is wrong from the input of `first` on, at one output pixel of each tile next to the centre of the image (row 3 or 4, column 4 or 5), and spreads "
    "by one pixel a layer. The backward fits the wrong forward. So all gradients are wrong (head too, by its input). Edges of the halo, outer zeros, divisor 189 and the sums over both axes are right. Fix: exchange the columns "
    "from the tile already widened by the rows (or exchange with the diagonal neighbours)."
)
