"""Forecasting from sliding windows under DDP (three ranks with 2, 3 and 1 series, three micro-batches, no_sync for the first two): a series of 14 samples is cut into the windows 0-5, 4-9 and 8-13; micro-batch after micro-batch one window
of all own
series, standardised per window and channel (RevIN), predicts two values. The order of the windows is shuffled per rank.

The bug: the windows are views of the series, and the standardisation works in place. The two samples that neighbouring windows share are standardised again when the second of the two has its turn. As in weecology/DeepForest PR 1293
(review: in-place
normalization corrupts overlapping window crops) and pytorch/vision issue 680.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SAMPLES, CHANNELS, LONG, STARTS = 14, 2, 6, [0, 4, 8]
PARTS = [(0, 2), (2, 5), (5, 6)]
ORDER = [[0, 1, 2], [0, 2, 1], [2, 1, 0]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(CHANNELS, 5, 3, padding=1)
        self.hidden, self.head = nn.Linear(5 * LONG, 6), nn.Linear(6, 2)

    def forward(self, x):
        x = F.silu(self.conv(x.transpose(1, 2)))
        return self.head(torch.tanh(self.hidden(x.flatten(1))))


def standardised(window, in_place):
    mean, spread = window.mean(1, keepdim=True), window.std(1, keepdim=True) + 0.1
    return window.sub_(mean).div_(spread) if in_place else (window - mean) / spread


def window_loss(model, series, target, number, in_place):
    window = series[:, STARTS[number] : STARTS[number] + LONG]
    return (model(standardised(window, in_place)) - target[:, number]).square().sum()


class Clean:
    in_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][1]
        walk = torch.randn(rows, SAMPLES, CHANNELS, generator=g).cumsum(1) + 3
        return {"series": walk, "target": torch.randn(rows, len(STARTS), 2, generator=g)}

    def loss_sum(self, model, rows):
        losses = [
            window_loss(model, rows["series"], rows["target"], n, False) for n in range(len(STARTS))
        ]
        return sum(losses), len(rows["series"]) * len(STARTS)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        low, high = PARTS[ctx.rank]
        series, target = batch["series"][low:high].clone(), batch["target"][low:high]
        count = len(batch["series"]) * len(STARTS)
        for turn, number in enumerate(ORDER[ctx.rank]):
            last = turn == len(STARTS) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = window_loss(model, series, target, number, self.in_place)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    in_place = True


EXPECT = dict(
    right=[
        r"(?i)input|data|window|sample|series|standardi[sz]|normali[sz]|conv|in.?place|forward",
        r"(?i)micro.?batch|later|second|overlap|window|turn|rank",
        r"(?i)input|wrong|differ|other|twice|again|chang|overw|in.?place|not (the )?(own|right)",
    ],
    place=[r"(?i)input|data|window|series|standardi|conv"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(labels?|targets?) .{0,20}(is|are) (wrong|of)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read)|only the last micro.?batch",
        r"(?i)adjoint|backward of .{0,20}(is|are) wrong",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)only (on )?rank \d|rank \d alone",
    ],
)
WHY = (
    "The input of the model is wrong in some micro-batches, on all ranks. Rank 0 (rows 0, 1; order 0, 1, 2): micro-batch 0 right; window 1 in micro-batch 1 has samples 4, 5 already standardised by window 0; window 2 in micro-batch 2 "
    "has samples 8, 9 already standardised "
    "by window 1. Rank 1 (rows 2-4; order 0, 2, 1): micro-batches 0 and 1 right (no overlap), window 1 in micro-batch 2 wrong at both ends. Rank 2 (row 5; order 2, 1, 0): micro-batch 0 right, window 1 in micro-batch 1 wrong at samples "
    "8, 9, window 0 in "
    "micro-batch 2 wrong at 4, 5. As mean and spread of the window are taken over the mixture, all six samples of such a window are wrong. So the forward starts wrong at conv's input, and all parameters' gradients are wrong, the same "
    "on all ranks after DDP's "
    "average. Targets, divisor 18, no_sync and reduction are right. Fix: standardise out of place (or clone the window)."
)
