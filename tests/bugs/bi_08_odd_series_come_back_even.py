"""A forecaster with the auto-correlation of Autoformer under DDP on two ranks, three micro-batches each (no_sync before the last). Two series go through one auto-correlation layer: hours (12 steps) and weeks (9 steps). The correlation at
all lags comes from a Fourier transform and back; the three best lags of every row are taken, and the values are rolled by them and added with softmax weights.

The bug: the transform back is not told how long the series was; without it an even length is assumed, and 9 steps come back as 8. After huggingface/transformers PR 21891 (Autoformer; review of irfft without n).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
HOURS, WEEKS, WIDTH, BEST, AHEAD, ROWS = 12, 9, 6, 3, 4, 13
PARTS = [[(0, 2), (2, 5), (5, 6)], [(6, 9), (9, 10), (10, 13)]]


class AutoCorrelation(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keep_length = True

    def forward(self, x):
        length = x.shape[1] if self.keep_length else None
        q = torch.fft.rfft(self.query(x), dim=1)
        k = torch.fft.rfft(self.key(x), dim=1)
        lags = torch.fft.irfft(q * k.conj(), n=length, dim=1).mean(-1)
        weight, lag = lags.topk(BEST, 1)
        v = self.value(x)
        step = (torch.arange(x.shape[1])[None, None] + lag[:, :, None]) % x.shape[1]
        rolled = v[torch.arange(len(v))[:, None, None], step]
        return self.out((rolled * weight.softmax(1)[:, :, None, None]).sum(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter_hours, self.enter_weeks = nn.Linear(2, WIDTH), nn.Linear(2, WIDTH)
        self.correlation, self.norm = AutoCorrelation(), nn.LayerNorm(WIDTH)
        self.wide = nn.Linear((HOURS + WEEKS) * WIDTH, 16)
        self.head = nn.Linear(16, AHEAD)
        with torch.no_grad():
            for layer in (self.correlation.query, self.correlation.key):
                layer.weight.mul_(2)

    def encode(self, x):
        return self.norm(x + self.correlation(x)).flatten(1)

    def forward(self, hours, weeks):
        x = [self.encode(self.enter_hours(hours)), self.encode(self.enter_weeks(weeks))]
        return self.head(F.silu(self.wide(torch.cat(x, 1))))


class Clean:
    keep_length = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "hours": torch.randn(ROWS, HOURS, 2, generator=g),
            "weeks": torch.randn(ROWS, WEEKS, 2, generator=g),
            "ahead": torch.randn(ROWS, AHEAD, generator=g),
        }

    def loss_sum(self, model, rows):
        error = model(rows["hours"], rows["weeks"]) - rows["ahead"]
        return error.square().mean(1).sum(), len(error)

    def distribute(self, model, ctx):
        model.correlation.keep_length = self.keep_length
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    keep_length = False


EXPECT = dict(
    right=[
        r"(?i)correlation|irfft|fft|lags?|keep_length",
        r"(?i)irfft|fft|length|lags?|size|shape|\b8\b|even|odd|keep_length|second call|call 1|call 2|weeks",
    ],
    place=[r"(?i)correlation|irfft|keep_length|\blags\b"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)(query|key|value|enter_hours|enter_weeks) (goes|is) wrong in (its|the) forward|hours .{0,25}(is|are|goes) wrong",
        r"(?i)only (on )?rank [01]\b|recomput|labels? .{0,20}(is|are) wrong|left over|stale",
    ],
)
WHY = (
    "torch.fft.irfft without n gives 2 * (bins - 1) steps: 12 for the hours (7 bins, right) and 8 for the weeks (9 steps, 5 bins; right is 9). So in the second call of `correlation` in each forward (weeks), the lags are 8 numbers of "
    "another transform instead of 9: other values, other best lags and other softmax weights. What goes in, query, key, value are right; the output of correlation is wrong there, in all rows, micro-batches, on both ranks; the first call "
    "(hours) is right. DDP, no_sync, the divisor 13 are right. Fix: n = x.shape[1] in irfft."
)
