"""Second stage of a detector (mmdetection style) under DDP on three ranks with two micro-batches each (no_sync for the first): a backbone gives one feature map per image, the boxes of all images of a micro-batch are put into one list of
regions (image number, x0, y0, x1, y1), pooled 2 x 2 from the map of their image, and classified and refined. The divisor is the number of boxes of all ranks. Some images have no box.

The bug: the list of regions is made from the images that have boxes (empty ones are filtered out, since the pooling and the concatenation do not like empty tensors) and the image number is counted in the filtered list. Behind an image
without boxes, boxes are pooled from the map of an earlier image. After bbox2roi of mmdetection, which appends an empty tensor for such images to keep the numbers, and questions like longcw/RoIAlign.pytorch #14 on how box_index is made.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, CHANNELS, WIDTH, CLASSES, MOST = 8, 2, 6, 5, 3
PARTS = [[(0, 3), (3, 5)], [(5, 7), (7, 9)], [(9, 11), (11, 13)]]
BOXES = [2, 0, 1, 1, 3, 0, 2, 1, 1, 2, 1, 0, 3]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(CHANNELS, WIDTH, 3, padding=1),
            nn.GroupNorm(2, WIDTH),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.SiLU(),
        )
        self.shared = nn.Linear(4 * WIDTH, 10)
        self.classes, self.refine = nn.Linear(10, CLASSES), nn.Linear(10, 4)

    def forward(self, image, regions):
        maps = self.backbone(image)
        pooled = [
            F.adaptive_avg_pool2d(maps[i : i + 1, :, y0:y1, x0:x1], 2).flatten(1)
            for i, x0, y0, x1, y1 in regions.tolist()
        ]
        hidden = F.silu(self.shared(torch.cat(pooled) if pooled else maps.new_zeros(0, 4 * WIDTH)))
        return self.classes(hidden), self.refine(hidden), maps.sum() * 0


def regions_of(rows, skip_empty):
    boxes = [box[:n] for box, n in zip(rows["box"], rows["boxes"].tolist())]
    if skip_empty:
        boxes = [b for b in boxes if len(b)]
    numbered = [torch.cat([torch.full((len(b), 1), i), b], 1) for i, b in enumerate(boxes)]
    return torch.cat(numbered) if numbered else torch.zeros(0, 5, dtype=torch.long)


def detection_loss(model, rows, skip_empty):
    there = torch.arange(MOST)[None] < rows["boxes"][:, None]
    scores, deltas, nothing = model(rows["image"], regions_of(rows, skip_empty))
    loss = F.cross_entropy(scores, rows["label"][there], reduction="sum")
    return (
        loss
        + F.smooth_l1_loss(deltas, rows["delta"][there].to(deltas.dtype), reduction="sum")
        + nothing
    )


class Clean:
    skip_empty = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(BOXES)
        corner = torch.randint(0, 4, (rows, MOST, 2), generator=g)
        size = torch.randint(2, 5, (rows, MOST, 2), generator=g)
        return {
            "image": torch.randn(rows, CHANNELS, SIDE, SIDE, generator=g),
            "boxes": torch.tensor(BOXES),
            "box": torch.cat([corner, corner + size], 2),
            "label": torch.randint(CLASSES, (rows, MOST), generator=g),
            "delta": torch.randn(rows, MOST, 4, generator=g),
        }

    def loss_sum(self, model, rows):
        return detection_loss(model, rows, False), int(rows["boxes"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        boxes = int(batch["boxes"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (detection_loss(model, rows, self.skip_empty) * ctx.world_size / boxes).backward()


class Buggy(Clean):
    skip_empty = True


EXPECT = dict(
    right=[
        r"(?i)rows?|image|micro.?batch|region|box|pool|shared|forward|input",
        r"(?i)(other|wrong|foreign|different|another|earlier|preceding|previous|mis|shift|index|number|input|forward|not (the )?(own|right))",
        r"(?i)image|region|box|pool|shared|row|backbone|maps?",
    ],
    place=[r"(?i)region|box|pool|shared|backbone|image|row"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)labels? .{0,20}(is|are) (wrong|of)|backbone.{0,20}(forward|output).{0,15}wrong",
        r"(?i)only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)all (three )?ranks.{0,30}(all|every|both) micro.?batch|only (on )?rank [012]\b",
    ],
)
WHY = (
    "Rows (images) 1, 5 and 11 have no box. Rank 0, micro-batch 0 (rows 0, 1, 2): the box of row 2 is pooled from the map of row 1. Rank 1, micro-batch 0 (rows 5, 6): both boxes of row 6 from the map of row 5. Rank 2, micro-batch 1 (rows 11, 12): "
    "the three boxes of row 12 from the map of row 11. All other micro-batches are right. The maps of the backbone are right, the pooled regions are not: the forward goes wrong at the input of `shared` for these 6 of 17 boxes. Labels and deltas stay "
    "with their boxes. So the gradients of shared, classes and refine are wrong (wrong features), and those of the backbone (sent to the images without boxes instead of rows 2, 6 and 12), equally on all ranks after DDP's average. Divisor 17, no_sync "
    "and reduction are right. Fix: number the images before the empty ones are left out, as bbox2roi does."
)
