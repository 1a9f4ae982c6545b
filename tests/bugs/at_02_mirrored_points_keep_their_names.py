"""Key points of a body (nose, two shoulders, two hips) by regression from images, DistributedDataParallel on three ranks with two micro-batches each (no_sync for the first), uneven numbers of rows. Images whose flag says so are mirrored
on the fly together with their points. The divisor is the number of visible points of all ranks.

The bug: the mirrored points get new x coordinates, but left and right are not exchanged (nor are their visibilities): the left shoulder of a mirrored image keeps the name of the left one. As in questions and fixes of
ultralytics (issues 2052 and 5184, flip_idx), DeepLabCut PR 1805, talmolab/sleap PR 455, princeton-vl/pytorch_stacked_hourglass issue 43.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SIDE, CHANNELS, WIDTH = 6, 2, 6
PAIRS = [0, 2, 1, 4, 3]
PARTS = [[(0, 2), (2, 5)], [(5, 7), (7, 8)], [(8, 11), (11, 13)]]
FLIPS = [0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.second = nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.points = nn.Linear(WIDTH * 9, 2 * len(PAIRS))

    def forward(self, image):
        h = F.silu(self.second(F.silu(self.norm(self.first(image)))))
        return self.points(h.flatten(1)).unflatten(1, (len(PAIRS), 2))


def prepared(rows, exchange):
    flip = rows["flip"] > 0
    image = torch.where(flip[:, None, None, None], rows["image"].flip(-1), rows["image"])
    point, seen = rows["point"], rows["seen"]
    mirrored = torch.stack([1 - point[..., 0], point[..., 1]], -1)
    other = seen
    if exchange:
        mirrored, other = mirrored[:, PAIRS], seen[:, PAIRS]
    return (
        image,
        torch.where(flip[:, None, None], mirrored, point),
        torch.where(flip[:, None], other, seen),
    )


def point_loss(model, rows, exchange):
    image, point, seen = prepared(rows, exchange)
    loss = F.smooth_l1_loss(model(image), point, reduction="none", beta=0.3).sum(-1)
    return (loss * seen).sum()


class Clean:
    exchange = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(FLIPS)
        seen = (torch.rand(rows, len(PAIRS), generator=g) < 0.75).long()
        seen[:, 1] = 1
        return {
            "image": torch.randn(rows, CHANNELS, SIDE, SIDE, generator=g),
            "point": torch.rand(rows, len(PAIRS), 2, generator=g),
            "seen": seen,
            "flip": torch.tensor(FLIPS),
        }

    def loss_sum(self, model, rows):
        return point_loss(model, rows, True), int(rows["seen"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = int(batch["seen"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = point_loss(model, rows, self.exchange)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    exchange = False


EXPECT = dict(
    right=[
        r"(?i)rows?|images?|micro.?batch|flip|mirror|points?|targets?|labels?|loss",
        r"(?i)target|label|flip|mirror|exchang|swap|left|loss (itself|function|value)?"
        r"|other (data|values)"
        r"|wrong (data|values|points?|rows?)|ground truth",
    ],
    place=[r"(?i)rows?|flip|mirror|points?|targets?|labels?|loss"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))"
        r"|micro.?batch(es)? .{0,20}(lost|dropped)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(first|second|norm|points)(\.weight|\.bias)? .{0,30}(goes wrong|wrong) (in"
        r"|on) the forward",
        r"(?i)input images? .{0,20}(is|are) (wrong|different|other)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
    ],
)
WHY = (
    "Rows 1, 4 (rank 0, micro-batches 0 and 1), 7 (rank 1, micro-batch 1) and 8 (rank 2, micro-batch 0) are mirrored. Their images are mirrored rightly and their x coordinates become 1 - x, but the points 1 and 2 (shoulders), 3 and 4 "
    "(hips) and their visibilities are not exchanged, so that the target of the left point is the position of the right one. The input of the model, its forward and outputs are right on all ranks; the targets and the mask of the loss are "
    "wrong for these four rows only, so the gradient of the loss by the output is wrong there (nose excepted) and with it all parameters, equally on all ranks after DDP's average. All other rows and "
    "micro-batches, the divisor (visible points of all ranks), no_sync "
    "and the reduction are right. Fix: index points and visibilities of mirrored rows with the pairs (flip_idx)."
)
