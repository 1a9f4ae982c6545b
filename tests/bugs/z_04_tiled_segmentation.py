"""Semantic segmentation with the image cut in both directions, 2 x 2 tiles, convolutions with exchanged borders: spatial parallelism as in LBANN / DistConv (Dryden et al. 2019), Mesh-TensorFlow's halo_exchange, ORNL's and NVIDIA modulus' tiled models. Losses are summed over
the tile's labelled pixels; weights are replicated over the four tiles.

A 3 x 3 kernel at the corner of a tile needs the pixel diagonally across. The right order: exchange rows, then exchange columns of what was already padded. The bug: rows and columns are both taken from the unpadded tile (so that the two exchanges could overlap), and the corners are filled with zeros.
A classic of stencil codes; cf. the corner discussion in MPI halo-exchange tutorials.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"down": 2, "across": 2}}}}
HEIGHT, BREADTH, CHANNELS, WIDTH, CLASSES, ROWS, NO_LABEL = 7, 9, 3, 8, 4, 3, -1


class Borders(torch.autograd.Function):
    """The last line of the tile before and the first line of the tile after, along `dim`; zeros at the image's edge."""

    @staticmethod
    def forward(ctx, x, dim, place, number, group):
        ctx.dim, ctx.place, ctx.number, ctx.group, ctx.shape = dim, place, number, group, x.shape
        first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
        lines = x.new_zeros(number + 2, 2, *first.shape)  # one empty place on either side
        lines[place + 1, 0], lines[place + 1, 1] = first, last
        dist.all_reduce(lines, group=group)
        return lines[place, 1].clone(), lines[place + 2, 0].clone()

    @staticmethod
    def backward(ctx, before, after):
        lines = before.new_zeros(ctx.number + 2, 2, *before.shape)
        lines[ctx.place, 1], lines[ctx.place + 2, 0] = before, after
        dist.all_reduce(lines, group=ctx.group)
        grad = before.new_zeros(ctx.shape)
        grad.narrow(ctx.dim, 0, 1).add_(lines[ctx.place + 1, 0])
        grad.narrow(ctx.dim, ctx.shape[ctx.dim] - 1, 1).add_(lines[ctx.place + 1, 1])
        return grad, None, None, None, None


class Tiling:
    def __init__(self, ctx):
        self.i, self.j = ctx.mesh.get_local_rank("down"), ctx.mesh.get_local_rank("across")
        self.down, self.across = ctx.group("down"), ctx.group("across")

    def tile(self, x):
        """Of (..., height, breadth)."""
        return x.tensor_split(2, -2)[self.i].tensor_split(2, -1)[self.j]

    def rows_of_neighbours(self, x):
        return Borders.apply(x, 2, self.i, 2, self.down)

    def columns_of_neighbours(self, x):
        return Borders.apply(x, 3, self.j, 2, self.across)


def padded(x, tiling):
    above, below = tiling.rows_of_neighbours(x)
    x = torch.cat([above, x, below], 2)
    left, right = tiling.columns_of_neighbours(x)
    return torch.cat([left, x, right], 3)


def padded_at_once(x, tiling):
    above, below = tiling.rows_of_neighbours(x)
    left, right = tiling.columns_of_neighbours(x)
    x = torch.cat([above, x, below], 2)
    return torch.cat([F.pad(left, (0, 0, 1, 1)), x, F.pad(right, (0, 0, 1, 1))], 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(n, WIDTH, 3, padding=1) for n in (CHANNELS, WIDTH, WIDTH)
        )
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)
        self.tiling, self.pad = None, None

    def forward(self, x):
        for conv in self.convs:
            if self.tiling is None:
                x = conv(x)
            else:
                x = F.conv2d(self.pad(x, self.tiling), conv.weight, conv.bias)
            x = torch.tanh(1.5 * x)
        return self.head(x)


class Clean:
    pad = staticmethod(padded)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(CLASSES, (ROWS, HEIGHT, BREADTH), generator=g)
        labels[torch.rand(labels.shape, generator=g) < 0.2] = NO_LABEL
        return {"image": torch.randn(ROWS, CHANNELS, HEIGHT, BREADTH, generator=g), "label": labels}

    def loss_sum(self, model, rows):
        label = rows["label"]
        loss = F.cross_entropy(model(rows["image"]), label, ignore_index=NO_LABEL, reduction="sum")
        return loss, (label != NO_LABEL).sum()

    def distribute(self, model, ctx):
        model.tiling, model.pad = Tiling(ctx), self.pad
        return model

    def step(self, model, batch, ctx):
        tile = {k: model.tiling.tile(v) for k, v in batch.items()}
        loss, number = self.loss_sum(model, tile)
        everyone = ctx.group("down", "across")
        dist.all_reduce(number, group=everyone)
        (loss / number).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=everyone)


class Buggy(Clean):
    pad = staticmethod(padded_at_once)


EXPECT = dict(
    right=[
        r"(?i)forward|output|activation|value|conv|halo|border|pixel|corner|pad",
        r"(?i)halo|border|corner|diagonal|neighbou?r|pad|edge|tile|boundar|exchange",
    ],
    place=[r"(?i)conv|pad|halo|corner|border|tile|exchange"],
    wrong=[
        r"(?i)forward (is|values? (are|is)) right|forward .{0,12}agrees",
        r"(?i)parameters? .{0,30}(never|not) (been )?(all.?)?reduced|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)no halo|borders? (is|are) never exchanged|only (on )?rank 0",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
    ],
)
WHY = (
    "Both exchanges start from the unpadded tile, so the four corner pixels of each padded tile are zero. Three of a tile's corners lie at or beyond the image's edge, where zero is right; the one towards the middle of the image must be the pixel of the diagonal tile (rank 0 <-> 3, 1 <-> 2) and is zero. "
    "The forward goes wrong from the first convolution on (convs.0), on all four ranks, at one pixel per tile, the innermost: (row, column) of the image (3, 4) on rank 0, (3, 5) on rank 1, (4, 4) on rank 2, (4, 5) on rank 3, and spreads by one pixel per later convolution; from there all gradients are wrong (convs.*, head: 1 to 21 percent of their largest element with seed 0, <d, r> / <r, r> 0.98 to 1.02), equal on all ranks after the sum. "
    "Straight borders (above, below, left, right), the borders' backward, the count of labelled pixels and the reduction are right. Fix: exchange the columns of the tile that already has its rows padded."
)
