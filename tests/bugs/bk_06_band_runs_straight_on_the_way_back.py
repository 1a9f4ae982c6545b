"""Time series of four to eight steps are compared with learnt class prototypes of five steps by soft-DTW inside a Sakoe-Chiba band; a linear encoder and the prototypes are trained, data parallel on four
ranks (3, 2, 2 and 2 of nine rows), each rank in micro-batches of one and the other rows. The soft-DTW is a function with its own backward (Cuturi and Blondel's recursion).

The bug: the forward's band follows the slope of the two lengths (steps / 5), the backward's runs along the plain diagonal |i - j|. After the class of soft-DTW reimplementations where the bandwidth is
treated in one pass only (Maghoumi/pytorch-softdtw-cuda and others, issues on bandwidth with sequences of unlike lengths).
"""

import math

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
FEATURES, WIDTH, CLASSES, STEPS, LONGEST, ROWS = 3, 4, 3, 5, 8, 9
GAMMA, BAND = 0.7, 2.0


def sloped(i, j, n, m):
    return abs(i * (m - 1) / (n - 1) - j) <= BAND


def straight(i, j, n, m):
    return abs(i - j) <= BAND


class SoftDtw(torch.autograd.Function):
    band_back = staticmethod(sloped)

    @staticmethod
    def forward(ctx, cost):
        n, m = cost.shape
        d = cost.tolist()
        r = [[math.inf] * (m + 1) for _ in range(n + 1)]
        r[0][0] = 0.0
        for i in range(n):
            for j in range(m):
                ways = [w for w in (r[i][j], r[i][j + 1], r[i + 1][j]) if w < math.inf]
                if ways and sloped(i, j, n, m):
                    low = min(ways)
                    soft = low - GAMMA * math.log(sum(math.exp((low - w) / GAMMA) for w in ways))
                    r[i + 1][j + 1] = d[i][j] + soft
        ctx.path, ctx.cost = r, cost
        return cost.new_tensor(r[n][m])

    @classmethod
    def way_back(cls, ctx, grad):
        n, m = ctx.cost.shape
        d, r = ctx.cost.tolist(), ctx.path
        e = [[0.0] * (m + 1) for _ in range(n + 1)]
        e[n - 1][m - 1] = 1.0
        for i in reversed(range(n)):
            for j in reversed(range(m)):
                here = r[i + 1][j + 1]
                if (i, j) == (n - 1, m - 1) or here == math.inf or not cls.band_back(i, j, n, m):
                    continue
                for a, b in ((i + 1, j), (i, j + 1), (i + 1, j + 1)):
                    if a < n and b < m and r[a + 1][b + 1] < math.inf:
                        e[i][j] += e[a][b] * math.exp((r[a + 1][b + 1] - d[a][b] - here) / GAMMA)
        return grad * ctx.cost.new_tensor([row[:m] for row in e[:n]])

    @staticmethod
    def backward(ctx, grad):
        return SoftDtw.way_back(ctx, grad)


class SoftDtwStraight(SoftDtw):
    band_back = staticmethod(straight)

    @staticmethod
    def backward(ctx, grad):
        return SoftDtwStraight.way_back(ctx, grad)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(FEATURES, WIDTH)
        self.prototypes = nn.Parameter(torch.randn(CLASSES, STEPS, WIDTH) * 0.7)
        self.distance = SoftDtw

    def forward(self, series, lengths, labels):
        total = 0.0
        encoded = torch.tanh(self.encoder(series))
        for row, length, label in zip(encoded, lengths.tolist(), labels.tolist()):
            apart = row[:length, None] - self.prototypes[label][None]
            total = total + self.distance.apply((apart * apart).sum(-1))
        return total


class Clean:
    distance = SoftDtw

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "series": torch.randn(ROWS, LONGEST, FEATURES, generator=g),
            "lengths": torch.tensor([5, 8, 4, 6, 5, 7, 8, 4, 5]),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows["series"], rows["lengths"], rows["labels"]), len(rows["labels"])

    def distribute(self, model, ctx):
        model.distance = self.distance
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for part in (slice(0, 1), slice(1, None)):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in mine.items()})
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    distance = SoftDtwStraight


EXPECT = dict(
    right=[
        r"backward|gradient formula|derivative|adjoint|way back|hand.?written|autograd|custom function",
        r"soft.?dtw|dtw|cost|distance|function|band",
    ],
    place=[r"soft.?dtw", r"\bcost\b", r"distance", r"way_back", r"band"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the (last|first) micro.?batch",
        r"(forward|loss value|value of the loss) (is|are) wrong|row 0 .{0,20}wrong",
    ],
)
WHY = (
    "SoftDtwStraight.backward leaves out cells with |i - j| > 2, while the forward's band is |i * 4 / (n - 1) - j| <= 2. The forward and the loss are right on all ranks. For rows of 6, 7 and 8 steps the "
    "cells inside the forward's band but off the plain diagonal by more than 2 get no weight and hand none on; for 8 steps even the last cell (7, 4) is off by 3 (it keeps its 1) and all cells beside it at "
    "(6, 3), too, are cut. Rows of 4 and 5 steps are right (cells outside the forward's band have infinite cost). Wrong rows: 1 (8), 3 (6), 5 (7), 6 (8), that is rank 0's second micro-batch, rank 1's "
    "first, and rank 2's both; rank 3 (rows 7 and 8) is right until the sum. Encoder and prototypes (of the labels of these rows) get wrong gradients. Divisor 9 and sum are right. Fix: the same band in "
    "both passes."
)
