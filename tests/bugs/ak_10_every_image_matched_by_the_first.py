"""A small set-prediction detector (DETR) under DDP on three ranks with two micro-batches each (no_sync for the first): every image has four queries and up to three objects; the best one-to-one matching is found per image from a cost
(class probability and box distance), matched queries get class and box loss, the others the class "no object". Divisor: objects of all ranks.

The bug: the cost between all queries and all objects of the micro-batch is made at once and split by the images' objects, and then the costs of the micro-batch's first image are read for every image (c[0] for c[i]), so objects are
matched by another image's predictions. The line follows DETR's HungarianMatcher, linear_sum_assignment(c[i]) for i, c in enumerate(C.split(sizes, -1)), and reports on it in facebookresearch/detr.
"""

import contextlib
import itertools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, CHANNELS, WIDTH, QUERIES, CLASSES, MOST = 6, 2, 8, 4, 3, 3
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 7)], [(7, 8), (8, 12)]]
OBJECTS = [2, 3, 1, 2, 3, 2, 3, 1, 2, 0, 3, 2]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(CHANNELS, 6, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(24),
            nn.Linear(24, QUERIES * WIDTH),
        )
        self.query = nn.Parameter(torch.randn(QUERIES, WIDTH) * 0.3)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES + 1), nn.Linear(WIDTH, 4)

    def forward(self, image):
        x = 2 * self.backbone(image).unflatten(1, (QUERIES, WIDTH)) + self.query
        x = F.silu(self.mix(x)) + x
        return self.classes(x), self.boxes(x).sigmoid()


def assign(cost):
    """Queries of the objects 0, 1, ... with the least total cost."""
    n = cost.shape[1]
    tries = list(itertools.permutations(range(QUERIES), n))
    totals = torch.stack([cost[list(t), range(n)].sum() for t in tries])
    return list(tries[int(totals.argmin())])


@torch.no_grad()
def match(scores, boxes, rows, first):
    there = torch.arange(MOST)[None] < rows["objects"][:, None]
    label, box = rows["label"][there], rows["box"][there].to(boxes.dtype)
    cost = torch.cdist(boxes.flatten(0, 1), box, p=1) - scores.softmax(-1).flatten(0, 1)[:, label]
    pieces = cost.unflatten(0, (len(boxes), QUERIES)).split(rows["objects"].tolist(), -1)
    return [assign(c[0 if first else i]) for i, c in enumerate(pieces)]


def set_loss(model, rows, first):
    scores, boxes = model(rows["image"])
    total = scores.new_zeros(())
    for i, chosen in enumerate(match(scores, boxes, rows, first)):
        target = torch.full((QUERIES,), CLASSES)
        target[chosen] = rows["label"][i, : len(chosen)]
        total = total + F.cross_entropy(scores[i], target, reduction="sum")
        box = rows["box"][i, : len(chosen)].to(boxes.dtype)
        total = total + 2 * F.smooth_l1_loss(boxes[i, chosen], box, reduction="sum")
    return total


class Clean:
    first = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        n = len(OBJECTS)
        return {
            "image": torch.randn(n, CHANNELS, SIDE, SIDE, generator=g) * 2,
            "objects": torch.tensor(OBJECTS),
            "label": torch.randint(CLASSES, (n, MOST), generator=g),
            "box": torch.rand(n, MOST, 4, generator=g),
        }

    def loss_sum(self, model, rows):
        return set_loss(model, rows, False), int(rows["objects"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        objects = int(batch["objects"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = set_loss(model, rows, self.first)
                (loss * ctx.world_size / objects).backward()


class Buggy(Clean):
    first = True


EXPECT = dict(
    right=[
        r"(?i)loss|target|label|match|assign|derivative",
        r"(?i)rows?|image|micro.?batch|sample",
        r"(?i)loss|target|match|derivative|assign|objective",
    ],
    place=[r"(?i)loss|match|classes|boxes|target|output"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|"
        r"no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)(backbone|mix|classes|boxes)\S* .{0,20}computes something else|"
        r"forward of (backbone|mix)\S* .{0,20}wrong",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)all (three )?ranks.{0,30}(all|every|both) micro.?batch|"
        r"all (twelve )?rows (are )?wrong",
    ],
)
WHY = (
    "The network's outputs are right. In micro-batches of several images - rank 0 micro-batch 0 (rows 0-2), rank 1 micro-batch 0 (rows 4, 5), rank 2 micro-batch 1 (rows 8-11) - every image but the first (rows 1, 2, 5, 10, 11; row 9 "
    "has no object) is matched by the first image's predictions, so where the best assignment differs its queries get other classes and boxes as targets: the loss of these rows is wrong, and all gradients with it, in direction, "
    "equally on all ranks after DDP's average. First images and micro-batches of one image are right (rows 0, 3, 4, 6, 7, 8). Divisor 24, no_sync and reduction are right. Fix: c[i]."
)
