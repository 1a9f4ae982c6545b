"""SimSiam on small images under DDP on two ranks (four and three of seven pairs of views; two micro-batches a rank, the first under no_sync): a convolutional encoder with a projector, a predictor, and the
mean of the two negative cosines between one view's prediction and the other view's projection, which is a target and sends no gradient back. DDP averages, so the loss is multiplied by two and divided
by the seven pairs. The training step computes the loss from one joint forward of both views, with its own function `distance(prediction, target)`.

The bug: in the second of the two calls the arguments stand in the order of the views, not of the roles, so the prediction of the second view is detached as if it were the target, and the first view's
projection learns. The cosine is symmetric, so the loss is the same number. After the many reports about SimSiam and BYOL re-implementations (lightly, solo-learn, lightning-bolts) with the stop-gradient
on the wrong side.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CHANNELS, WIDTH, NARROW, SIZE, ROWS = 5, 8, 4, 6, 7


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, CHANNELS, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
        )
        self.projector = nn.Sequential(
            nn.Linear(CHANNELS * 4, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )
        self.predictor = nn.Sequential(
            nn.Linear(WIDTH, NARROW), nn.Tanh(), nn.Linear(NARROW, WIDTH)
        )

    def forward(self, images):
        z = self.projector(self.encoder(images))
        return z, self.predictor(z)


def distance(prediction, target):
    return -F.cosine_similarity(prediction, target.detach(), dim=-1).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Siamese()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        image = torch.randn(ROWS, 1, SIZE, SIZE, generator=g)
        return {
            "first": image + 0.5 * torch.randn(ROWS, 1, SIZE, SIZE, generator=g),
            "second": image.flip(-1) + 0.5 * torch.randn(ROWS, 1, SIZE, SIZE, generator=g),
        }

    def loss_sum(self, model, rows):
        z1, p1 = model(rows["first"])
        z2, p2 = model(rows["second"])
        one = F.cosine_similarity(p1, z2.detach(), dim=-1)
        two = F.cosine_similarity(p2, z1.detach(), dim=-1)
        return -(one + two).sum() / 2, len(z1)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def both_ways(self, z1, p1, z2, p2):
        return (distance(p1, z2) + distance(p2, z1)) / 2

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            with model.no_sync() if n == 0 else nullcontext():
                z, p = model(torch.cat([part["first"], part["second"]]))
                z1, z2 = z.chunk(2)
                p1, p2 = p.chunk(2)
                (self.both_ways(z1, p1, z2, p2) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def both_ways(self, z1, p1, z2, p2):
        return (distance(p1, z2) + distance(z1, p2)) / 2


EXPECT = dict(
    right=[
        r"detach|stop.?grad|no gradient|without (a )?gradient|cut off|target|not? .{0,30}(flow|sent|reach|path)",
        r"predict|project|distance|both_ways|cosine|loss|view|p2|z1",
    ],
    place=[r"distance", r"both_ways", r"predictor", r"projector", r"\bloss\b", r"cosine"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"(wrong|other) rows|(encoder|projector|predictor) .{0,20}(computes|is) wrong in the forward",
    ],
)
WHY = (
    "both_ways calls distance(z1, p2) where it should call distance(p2, z1). distance detaches its second argument, so in the second half of the loss the prediction p2 gets no gradient and the projection "
    "z1, which should be a fixed target, gets one. All forward values and the loss are right on both ranks, as the cosine is symmetric. The gradient that enters p2 is zero in every row, in both "
    "micro-batches on both ranks, so the predictor gets the first view's share only, and projector and encoder get a gradient through z1 that does not belong there and none through p2. DDP's averaging, "
    "no_sync and the factor 2 / 7 are right. Fix: put the prediction first in both calls."
)
