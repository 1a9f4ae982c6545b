"""Spatial parallelism by hand on three ranks: every image is cut along its height into bands of 4, 3 and 4 rows, a convolution and a PoolFormer mixer (3 x 3 average pooling minus the input, count_include_pad=False) read one row of each
neighbour through a halo exchange, and every pixel is classified. Two micro-batches of two and one images, gradients summed over the bands.

The bug: the halo exchange fills the rows above the first and below the last band with zeros, and the pooling then takes padding 0 along the height. So count_include_pad=False does not know that these rows are padding, and the windows
at the upper and lower edge of the image are divided by the number of rows with them. After sail-sg/poolformer issue 27 (why count_include_pad=False) and sonos/tract PR 2654 (padding done elsewhere, pooling divides by the wrong number
at the border).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
IMAGES, COLOURS, WIDTH, CLASSES, COLUMNS, MICRO = 3, 2, 5, 4, 6, 2
BANDS = [(0, 4), (4, 7), (7, 11)]
HEIGHT = 11


def edges_of_all(x, group):
    """First and last row of every rank's tensor."""
    own = torch.stack([x[:, :, 0], x[:, :, -1]])
    rows = [torch.empty_like(own) for _ in BANDS]
    dist.all_gather(rows, own.contiguous(), group=group)
    return rows


class Halo(torch.autograd.Function):
    """One row of each neighbour above and below, zeros beyond the image."""

    @staticmethod
    def forward(ctx, x, rank, group):
        ctx.rank, ctx.group = rank, group
        rows = edges_of_all(x, group)
        nothing = torch.zeros_like(x[:, :, 0])
        above = rows[rank - 1][1] if rank > 0 else nothing
        below = rows[rank + 1][0] if rank + 1 < len(BANDS) else nothing
        return torch.cat([above[:, :, None], x, below[:, :, None]], 2)

    @staticmethod
    def backward(ctx, grad):
        rows = edges_of_all(grad, ctx.group)
        own = grad[:, :, 1:-1].clone()
        if ctx.rank > 0:
            own[:, :, 0] += rows[ctx.rank - 1][1]
        if ctx.rank + 1 < len(BANDS):
            own[:, :, -1] += rows[ctx.rank + 1][0]
        return own, None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(COLOURS, WIDTH, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(WIDTH, 1, 1) + 0.5)
        self.mlp = nn.Sequential(nn.Conv2d(WIDTH, 7, 1), nn.GELU(), nn.Conv2d(7, WIDTH, 1))
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)
        self.rank, self.group, self.library = None, None, False

    def halo(self, x):
        return Halo.apply(x, self.rank, self.group)

    def pool(self, x):
        if self.group is None:
            return F.avg_pool2d(x, 3, 1, padding=1, count_include_pad=False)
        wide = self.halo(x)
        if self.library:
            return F.avg_pool2d(wide, 3, 1, padding=(0, 1), count_include_pad=False)
        there = torch.ones_like(wide[:1, :1])
        if self.rank == 0:
            there[:, :, 0] = 0
        if self.rank == len(BANDS) - 1:
            there[:, :, -1] = 0
        count = F.avg_pool2d(there, 3, 1, padding=(0, 1), divisor_override=1)
        return F.avg_pool2d(wide, 3, 1, padding=(0, 1), divisor_override=1) / count

    def convolve(self, x):
        if self.group is None:
            return self.stem(x)
        return F.conv2d(self.halo(x), self.stem.weight, self.stem.bias, padding=(0, 1))

    def forward(self, x):
        x = F.gelu(self.convolve(x))
        x = x + self.scale * (self.pool(x) - x)
        return self.head(x + self.mlp(x))


class Clean:
    library = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(IMAGES, COLOURS, HEIGHT, COLUMNS, generator=g),
            "label": torch.randint(CLASSES, (IMAGES, HEIGHT, COLUMNS), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["image"])
        return F.cross_entropy(scores, rows["label"], reduction="sum"), rows["label"].numel()

    def distribute(self, model, ctx):
        model.rank, model.group, model.library = ctx.rank, ctx.group("sp"), self.library
        return model

    def step(self, model, batch, ctx):
        low, high = BANDS[ctx.rank]
        for part in torch.arange(IMAGES).split(MICRO):
            scores = model(batch["image"][part, :, low:high])
            label = batch["label"][part, low:high]
            loss = F.cross_entropy(scores, label, reduction="sum")
            (loss / batch["label"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    library = True


EXPECT = dict(
    right=[
        r"(?i)forward|pool|halo|pad|input|mlp|head",
        r"(?i)pool|pad|border|edge|halo|outer|top|bottom|first and last|zero|rows?|mlp|scale"
        r"|ranks? 0 and (rank )?2|ranks? 0, 2|0 and 2",
        r"(?i)ranks? 0 and (rank )?2|ranks? 0, 2|0 and 2|outer|edge|border|pad"
        r"|first and (the )?last|pool",
    ],
    place=[r"(?i)pool|mlp|scale|halo|head"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|counted (twice|again)",
        r"(?i)wrong divisor of the loss|mean of means|loss.{0,20}divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)halo.{0,40}(missing|detach|without grad|not exchanged)",
        r"(?i)only (on )?rank \d\b|rank \d alone|rank 1 .{0,20}(is|goes) wrong",
        r"(?i)stem.{0,30}(forward|output) .{0,15}wrong",
    ],
)
WHY = (
    "The pooling of the bands pads only along the width; the rows beyond the image come as zeros from Halo. count_include_pad=False then divides by 3 rows x (2 or 3 columns) at image row 0 (rank 0) and image row 10 (rank 2), "
    "where 2 rows x (2 or 3) is right: the pooled value there is 2/3 of the right one. Inner rows, and rank 1 altogether, are right, so is the convolution (zeros are its padding). The forward goes wrong at the pooling, before "
    "the mlp, on ranks 0 and 2 in the edge rows of all images and micro-batches. Wrong gradients: scale, mlp, head, stem (all, since features and derivative at the edges are wrong). Halo exchange with its adjoint, labels, "
    "divisor 198, accumulation and the sum over the bands are right. Fix: divide by the number of rows that exist, as Clean does (ones with zeros beyond the image, pooled the same way)."
)
