"""Lift-splat: features of several cameras are lifted along depth and pooled in a bird's-eye
grid; three cameras on two ranks.

The pooling is the sorted cumulative-sum trick with a hand-written backward; the grids are summed
over the ranks and the head on the grid is computed by all. In the backward a point that is not
the last one of its cell takes the gradient of the cell before: the running number of ends is
read as if it were one of starts. After re-implementations of QuickCumsum.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cam": 2}}}}
CAMERAS, PIXELS, DEPTHS, CELLS, CLASSES = 3, 5, 4, 11, 3


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class CellSum(torch.autograd.Function):
    """Sum of the rows of equal cell, for rows sorted by cell."""

    @staticmethod
    def forward(ctx, x, cells):
        kept = torch.ones(len(cells), dtype=torch.bool)
        kept[:-1] = cells[1:] != cells[:-1]
        total = x.double().cumsum(0)[kept]
        ctx.save_for_backward(kept)
        return torch.cat([total[:1], total[1:] - total[:-1]]).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        back = kept.long().cumsum(0)
        back[kept] -= 1
        return grad[back], None


class CellSumByNumber(CellSum):
    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        cell = (kept.long().cumsum(0) - 1).clamp(min=0)
        return grad.index_select(0, cell), None


class LiftSplat(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(6, 9)
        self.depth = nn.Linear(9, DEPTHS)
        self.feature = nn.Linear(9, 5)
        self.head = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def lift(self, images):
        h = torch.tanh(self.backbone(images))
        return self.depth(h).softmax(-1)[..., None] * self.feature(h)[..., None, :]

    def forward(self, images, cells):
        b = len(images)
        points = self.lift(images).reshape(-1, 5)
        place = (cells + CELLS * torch.arange(b)[:, None, None, None]).flatten()
        grid = points.new_zeros(b * CELLS, 5).index_add(0, place, points)
        return self.head(grid.view(b, CELLS, 5))


class Clean:
    cell_sum = CellSum

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(171 + self.seed)
        return LiftSplat()

    def batch(self):
        g = torch.Generator().manual_seed(181 + self.seed)
        labels = torch.randint(CLASSES, (5, CELLS), generator=g)
        labels[torch.rand(5, CELLS, generator=g) < 0.2] = -100  # cells that nobody has seen
        return {
            "images": torch.randn(5, CAMERAS, PIXELS, 6, generator=g),
            "cells": torch.randint(CELLS, (5, CAMERAS, PIXELS, DEPTHS), generator=g),
            "labels": labels,
        }

    def loss_sum(self, model, rows):
        logits = model(rows["images"], rows["cells"])
        labels = rows["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return loss, (labels != -100).sum()

    def splat(self, points, place, size):
        place, order = place.sort(stable=True)
        sums = self.cell_sum.apply(points[order], place)
        return points.new_zeros(size, points.shape[-1]).index_copy(
            0, place.unique_consecutive(), sums
        )

    def step(self, model, batch, ctx):
        group = ctx.group("cam")
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        images, cells = (batch[k].tensor_split(world, 1)[rank] for k in ("images", "cells"))
        b = len(images)
        place = (cells + CELLS * torch.arange(b)[:, None, None, None]).flatten()
        grid = self.splat(model.lift(images).reshape(-1, 5), place, b * CELLS)
        logits = model.head(SumOverRanks.apply(grid, group))
        F.cross_entropy(logits, batch["labels"].flatten()).backward()
        for name, p in model.named_parameters():
            if not name.startswith("head."):
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    cell_sum = CellSumByNumber


EXPECT = {
    "right": [
        r"cell|voxel|segment|\bruns?\b|cumsum|cumulative|\bkept\b",
        (
            r"previous|before|preceding|off.?by.?one|neighbou?r|wrong (cell|voxel|segment|run|"
            r"group|row|index)|shift|minus one|- ?1|subtract\w* (1|one)|earlier"
        ),
    ],
    "place": [
        r"CellSumByNumber",
        r"CellSum",
        r"cumsum\(0\) ?- ?1",
        r"backward",
        r"index_select",
        r"cell_sum",
    ],
    "wrong": [
        (
            r"(grid|sum) (is )?not (all-?)?reduced|head\S* (gradients? )?(is |are )?(reduced|"
            r"summed) twice"
        ),
        r"order (is )?not (undone|inverted)|inverse permutation|unsorted",
        r"stable sort|precision|cancellation",
        r"overwrit|accumulate",
        r"uneven|camera count|divided by",
    ],
}

WHY = (
    "kept marks the last row of each run of equal cells, so the running sum of kept is "
    "already the right run number for all rows but the marked ones, from which 1 has to be "
    "taken. CellSumByNumber's backward takes 1 from all, so every point that is not the last "
    "of its cell gets the gradient of the previous cell (clamped at the first). The forward "
    "and the head's gradients are right; those of backbone, depth and feature are wrong. A "
    "right cause says that the backward of the cell sum indexes the gradient off by one (the "
    "cell before). Fix: back = cumsum(kept); back[kept] -= 1."
)
