"""Dense detector (RetinaNet style) under DDP on three ranks, two micro-batches each (no_sync for the first): a small convolutional net gives one score per class at every place of a map, and the sigmoid focal loss with an own backward
trains them. Labels: 0 .. 3 a class, 4 background, -1 to be ignored (mmdetection's numbering from version 2 on). The divisor is the number of places with an object on all ranks.

The bug: the loss was ported from a kernel that numbers the classes from one with background 0 (t == d + 1). The forward got the new numbering, the backward did not: it takes class d for the right one where the label is d + 1. After the
kernels of facebookresearch/maskrcnn-benchmark (issue 1002: d is 0-79, t is 1-80) and Media-Smart/vedatad issue 17 (t == d, which number is background).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, CLASSES, ALPHA, ROWS = 5, 4, 0.25, 9
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 8), (8, 9)]]


def plain_focal(scores, labels):
    right = labels[:, None] == torch.arange(CLASSES)
    log_p, log_q = F.logsigmoid(scores), F.logsigmoid(-scores)
    p, q = log_p.exp(), log_q.exp()
    loss = torch.where(right, -ALPHA * q**2 * log_p, -(1 - ALPHA) * p**2 * log_q)
    return (loss * (labels >= 0)[:, None]).sum()


class FocalLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, labels, first):
        ctx.save_for_backward(scores, labels)
        ctx.first = first
        return plain_focal(scores, labels)

    @staticmethod
    def backward(ctx, grad):
        scores, labels = ctx.saved_tensors
        right = labels[:, None] == torch.arange(CLASSES) + ctx.first
        log_p, log_q = F.logsigmoid(scores), F.logsigmoid(-scores)
        p, q = log_p.exp(), log_q.exp()
        yes = ALPHA * q**2 * (2 * p * log_p - q)
        no = (1 - ALPHA) * p**2 * (p - 2 * q * log_q)
        return grad * torch.where(right, yes, no) * (labels >= 0)[:, None], None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.SiLU())
        self.tower = nn.Conv2d(6, 6, 3, padding=1)
        self.classes = nn.Conv2d(6, CLASSES, 1)

    def forward(self, image):
        maps = self.classes(F.silu(self.tower(self.backbone(image))))
        return maps.permute(0, 2, 3, 1).reshape(-1, CLASSES)


class Clean:
    first = 0

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        place = torch.rand(ROWS, SIDE, SIDE, generator=g)
        label = torch.randint(CLASSES, (ROWS, SIDE, SIDE), generator=g)
        label = torch.where(place < 0.6, torch.full_like(label, CLASSES), label)
        label = torch.where(place > 0.9, torch.full_like(label, -1), label)
        return {"image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g), "label": label}

    def loss_sum(self, model, rows):
        label = rows["label"].flatten()
        objects = int(((label >= 0) & (label < CLASSES)).sum())
        return plain_focal(model(rows["image"]), label), objects

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        objects = int(((batch["label"] >= 0) & (batch["label"] < CLASSES)).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            scores = batch["image"][low:high], batch["label"][low:high].flatten()
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = FocalLoss.apply(model(scores[0]), scores[1], self.first)
                (loss * ctx.world_size / objects).backward()


class Buggy(Clean):
    first = 1


EXPECT = dict(
    right=[
        r"(?i)focal|loss",
        r"(?i)backward|hands? (back|on)|gradient (that|of|with|which)|adjoint|derivative",
        r"(?i)own (backward|Function)|Function|FocalLoss|hands? back|its backward|backward of",
    ],
    place=[r"(?i)focal|loss|classes|scores"],
    wrong=[
        r"(?i)(?<!not )(?<!nor )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|no_sync.{0,40}(wrong"
        r"|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)backward of (tower|backbone|classes|the convolution) is wrong",
    ],
)
WHY = (
    "FocalLoss.backward compares the labels with the class numbers 1 .. 4, while labels and forward use 0 .. 3 and 4 for background. For a place with object class 1, 2 or 3 the column one lower gets the `right` derivative and the "
    "true class the other one, an object of class 0 has no right class at all, and background (4) counts as the last class, column 3. "
    "Ignored places (-1) stay zero. The forward and the value of the loss are right; the gradient that FocalLoss hands back is wrong at all counted places, in all micro-batches and rows of all three ranks, and with it those of "
    "classes, tower and backbone (all parameters), equally after DDP's average. Divisor, no_sync and reduction are right. "
    "Fix: compare with torch.arange(CLASSES) in the backward as well."
)
