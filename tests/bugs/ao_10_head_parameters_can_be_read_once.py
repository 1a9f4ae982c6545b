"""A small detector (convolutional trunk, class head and box head on every cell) on three ranks, data parallel by hand, three micro-batches each of uneven size. The gradients of the trunk accumulate in .grad; those of the heads are added
after each micro-batch to main gradients of their own and .grad is freed; at the end the main gradients become .grad and all gradients are all-reduced. Divisor: all cells of all images that have a label.

The bug: the parameters of the heads come from filter(...), an iterator that can be walked through once. The first micro-batch adds its gradients and uses it up; from the second on, the loop has no turns, and what has gathered in .grad is
replaced by the main gradients at the end. After PixArt-alpha #160 (filter() is iterable only once), pytorch/pytorch #148259 and torchtitan #1258 (exhausted generators of parameters).
"""

import itertools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, CHANNELS, WIDTH, CLASSES = 6, 2, 6, 4
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)], [(9, 11), (11, 13), (13, 14)]]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(CHANNELS, WIDTH, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
            nn.GroupNorm(2, WIDTH),
            nn.SiLU(),
        )
        self.classes = nn.Conv2d(WIDTH, CLASSES, 1)
        self.boxes = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.SiLU(), nn.Conv2d(WIDTH, 4, 1))

    def forward(self, image):
        maps = self.trunk(image)
        return self.classes(maps), self.boxes(maps)


def detection_loss(model, rows):
    scores, boxes = model(rows["image"])
    there = rows["label"] >= 0
    target = rows["box"].to(boxes.dtype)
    return (
        F.cross_entropy(scores, rows["label"], ignore_index=-1, reduction="sum")
        + (F.smooth_l1_loss(boxes, target, reduction="none").sum(1) * there).sum()
    )


class Clean:
    once = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Detector()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows, cells = PARTS[-1][-1][1], SIDE // 2
        label = torch.randint(CLASSES, (rows, cells, cells), generator=g)
        label[torch.rand(rows, cells, cells, generator=g) < 0.4] = -1
        return {
            "image": torch.randn(rows, CHANNELS, SIDE, SIDE, generator=g),
            "label": label,
            "box": torch.randn(rows, 4, cells, cells, generator=g),
        }

    def loss_sum(self, model, rows):
        return detection_loss(model, rows), int((rows["label"] >= 0).sum())

    def step(self, model, batch, ctx):
        count = int((batch["label"] >= 0).sum())
        heads = filter(
            lambda p: p.requires_grad,
            itertools.chain(model.classes.parameters(), model.boxes.parameters()),
        )
        if not self.once:
            heads = list(heads)
        main = {}
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (detection_loss(model, rows) / count).backward()
            for p in heads:
                main[p] = main[p] + p.grad if p in main else p.grad
                p.grad = None
        for p, grad in main.items():
            p.grad = grad
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    once = True


EXPECT = dict(
    right=[
        r"(?i)classes|boxes|heads?\b",
        r"(?i)micro.?batch|accumulat|turn|rows?",
        r"(?i)first|only|lost|miss|lack|drop|overwritten|replaced|never|absent|not (in|added|accumulated|counted)|without|no (part|contribution)|zero|coefficient 0",
    ],
    place=[r"(?i)classes|boxes|heads?\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward.{0,20}(is|goes) wrong|backward of .{0,30}wrong",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)trunk.{0,30}(is|are) wrong|trunk .{0,30}(lost|lacks|misses)",
        r"(?i)only the last micro.?batch|last micro.?batch (alone|only)|first micro.?batch .{0,20}(lost|missing|dropped|never)",
        r"(?i)all (the )?parameters|every parameter",
    ],
)
WHY = (
    "All three ranks: the gradients of classes.* and boxes.* hold the first micro-batch of each rank only (rows 0-1, 5, 9-10); the parts of micro-batches 1 and 2 (rows 2-4, 6-8, 11-13) were left in .grad and replaced by the main "
    "gradients at the end. The trunk's gradients are right with all rows (they accumulate in .grad, and the heads' forward and backward are right). Divisor, all-reduce, labels are right. Fix: make a list of the heads' parameters."
)
