"""A one-stage detector under DDP of three: focal loss of all locations and L1 of the boxes, both divided by the number of positive locations
of the whole batch. The last rank's images show nothing. After the DETR / RetinaNet normaliser: the guard against zero is put around each
rank's own number, before the all-reduce.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, CLASSES, POSITIVES = 8, 8, 3, 9
PLACES = (SIDE // 2) ** 2


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(8, 10, 3, padding=1),
            nn.SiLU(),
        )
        self.kind = nn.Conv2d(10, CLASSES, 1)
        self.box = nn.Conv2d(10, 4, 3, padding=1)

    def forward(self, x):
        x = self.backbone(x)
        return self.kind(x).flatten(2).mT, self.box(x).flatten(2).mT


def detection(outputs, rows):
    logits, boxes = outputs
    positive = rows["label"] >= 0
    truth = F.one_hot(rows["label"].clamp(min=0), CLASSES).to(logits.dtype) * positive[..., None]
    p = logits.sigmoid()
    hard = torch.where(truth > 0, 0.25 * (1 - p).square(), 0.75 * p.square())
    focal = (hard * F.binary_cross_entropy_with_logits(logits, truth, reduction="none")).sum()
    return focal + 2 * (boxes - rows["box"])[positive].abs().sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Detector()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        label = torch.full((ROWS, PLACES), -1)
        shown = label[: ROWS - 2].flatten()  # the last two images are empty
        at = torch.randperm(len(shown), generator=g)[:POSITIVES]
        shown[at] = torch.randint(CLASSES, (POSITIVES,), generator=g)
        label[: ROWS - 2] = shown.view(ROWS - 2, PLACES)
        return {
            "image": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "label": label,
            "box": torch.rand(ROWS, PLACES, 4, generator=g) * 2,
        }

    def loss_sum(self, model, rows):
        return detection(model(rows["image"]), rows), (rows["label"] >= 0).sum()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def positives(self, rows, group):
        count = (rows["label"] >= 0).sum()
        dist.all_reduce(count, group=group)
        return count.clamp(min=1)

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        rows = {k: v.tensor_split(n)[me] for k, v in batch.items()}
        loss = detection(model(rows["image"]), rows)
        (loss * n / self.positives(rows, ctx.group("dp"))).backward()


class Buggy(Clean):
    def positives(self, rows, group):
        count = (rows["label"] >= 0).sum().clamp(min=1)
        dist.all_reduce(count, group=group)
        return count


EXPECT = dict(
    right=[
        r"factor|times|divid|divisor|count|denominator|scale|0\.9|9/10|9 of 10",
        r"0\.9(?!\d*[1-9])|9/10|9 of 10|\b10\b|1\.11|10/9|loss",
    ],
    place=[r"loss|(all|every|each) (rank|param|gradient)|denominator|divisor|count"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"divides by its own (count|number|denominator)",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"rank 2\S* (alone|only)|only on rank",
        r"(forward|activation)\S* .{0,30}(is|are|goes) wrong",
        r"mean of (the )?means",
    ],
)
WHY = (
    "Each rank raises its own number of positives to at least 1 before the sum. Rank 2 has none and adds one, so all ranks divide by 10 where "
    "the batch has 9 positives: every gradient on every rank is 0.9 times the right one. Forward, backward and reduction are right."
)
