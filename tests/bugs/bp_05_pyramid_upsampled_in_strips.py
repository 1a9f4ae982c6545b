"""The top-down path of a feature pyramid (FPN) on frozen backbone features of two levels, 10 x 7 and 5 x 4, with a semantic head (padding is label 255). The rows of the maps are cut over three ranks: 4, 3, 3 rows of the
finer and 2, 2, 1 of the coarser level. The coarse level is gathered, upsampled bilinearly to the finer one's size, and each rank takes its own rows. Two micro-batches, gradients summed over the ranks.

The bug: each rank upsamples its own coarse rows to the number of its own fine rows. Neither is the ratio that of the maps (3 from 2, 3 from 1), nor do the rows at the strips' borders mix with the neighbour's. After spatially
parallel segmentation code (F.interpolate(top, size=lateral.shape[-2:]) is left as it was when the maps become strips).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"rows": 3}}}}
ROWS, FINE, COARSE, CLASSES = 5, (10, 7), (5, 4), 4


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.lateral_4 = nn.Conv2d(5, 6, 1)
        self.lateral_5 = nn.Conv2d(7, 6, 1)
        self.head = nn.Sequential(
            nn.GELU(), nn.Conv2d(6, 6, 1), nn.GELU(), nn.Conv2d(6, CLASSES, 1)
        )

    def forward(self, c4, c5, resize):
        top = torch.tanh(self.lateral_5(c5))
        return self.head(self.lateral_4(c4) + resize(top))


class GatherRows(torch.autograd.Function):
    """All ranks' rows of a map; each rank uses them differently, so gradients are summed."""

    @staticmethod
    def forward(fctx, own, lo, total, group):
        fctx.place, fctx.group = (lo, lo + own.shape[2]), group
        full = own.new_zeros(*own.shape[:2], total, own.shape[3])
        full[:, :, lo : lo + own.shape[2]] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, :, slice(*fctx.place)], None, None, None


def bounds(total, ctx):
    own = torch.arange(total).tensor_split(ctx.axes["rows"])[ctx.coords["rows"]]
    return int(own[0]), int(own[-1]) + 1


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pyramid()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(CLASSES, (ROWS, *FINE), generator=g)
        return {
            "c4": torch.randn(ROWS, 5, *FINE, generator=g),
            "c5": torch.randn(ROWS, 7, *COARSE, generator=g),
            "labels": labels.masked_fill(torch.rand(ROWS, *FINE, generator=g) < 0.2, 255),
        }

    @staticmethod
    def criterion(logits, labels):
        return F.cross_entropy(logits, labels, ignore_index=255, reduction="sum")

    def loss_sum(self, model, rows):
        def resize(top):
            return F.interpolate(top, FINE, mode="bilinear")

        logits = model(rows["c4"], rows["c5"], resize)
        return self.criterion(logits, rows["labels"]), (rows["labels"] != 255).sum()

    def top_down(self, top, ctx):
        lo, _ = bounds(COARSE[0], ctx)
        top = GatherRows.apply(top, lo, COARSE[0], ctx.group("rows"))
        lo, hi = bounds(FINE[0], ctx)
        return F.interpolate(top, FINE, mode="bilinear")[:, :, lo:hi]

    def step(self, model, batch, ctx):
        (a, b), (c, d) = bounds(FINE[0], ctx), bounds(COARSE[0], ctx)
        total = (batch["labels"] != 255).sum()
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            c4, c5, labels = part["c4"][:, :, a:b], part["c5"][:, :, c:d], part["labels"][:, a:b]
            logits = model(c4, c5, lambda top: self.top_down(top, ctx))
            (self.criterion(logits, labels) / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("rows"))


class Buggy(Clean):
    def top_down(self, top, ctx):
        lo, hi = bounds(FINE[0], ctx)
        return F.interpolate(top, (hi - lo, FINE[1]), mode="bilinear")


EXPECT = dict(
    right=[
        r"interpolat|upsampl|resiz|resampl|top.?down|bilinear|coarse",
        r"own|strip|shard|local|neighbou?r|border|ratio|gather|other ranks|exchange|its (rows|part)|halo|per rank|each rank",
    ],
    place=[r"top_down", r"interpolate", r"GatherRows", r"resize|coarse|lateral_5"],
    wrong=[
        r"parameters?.{0,30}(not|never) reduced|missing all.?reduc.{0,20}parameter|reduced twice",
        r"divisor|mean of means|own count|ignored? (label|pixel)",
        r"backward.{0,30}(alone|only) .{0,10}wrong|forward is right",
        r"only the last micro.?batch|labels .{0,20}(shift|wrong)",
    ],
)
WHY = (
    "Upsampling 5 rows to 10 has the ratio 2 and mixes neighbouring rows. The Buggy ranks upsample their own strip (2 to 4, 2 to 3 and 1 to 3 rows): the row at each border doesn't mix with the neighbour's, and on the ranks 1 and 2 the ratio differs as well. So the "
    "forward and all gradients are wrong on all ranks, in both micro-batches; no rank asks another for its coarse rows. A right cause names the upsampling/interpolation (top-down path) and that it is of the own strip (borders, ratio, gather missing). Fix: gather the "
    "coarse map (or a halo) and interpolate by the positions of the whole map."
)
