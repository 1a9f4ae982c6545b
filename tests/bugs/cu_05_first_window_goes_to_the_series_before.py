"""A dilated convolution network that forecasts the next value of a time series from the six
before it. Four series of unlike length (11, 8, 13, 9 of 16 columns) give 17 windows, which are
dealt out evenly over three ranks (6, 6, 5), micro-batches of four windows.

Bug: the number of a window is looked up in the running ends of the series with the wrong side of
searchsorted, so a number that equals an end is given to the series that is over. After index
look-ups in concatenated data sets (bisect_left for bisect_right).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LENGTHS, COLUMNS, PAST = (11, 8, 13, 9), 16, 6


class Windows:
    """All windows of all series, one after the other, as a list that knows its length."""

    def __init__(self, batch):
        self.series = batch["series"]
        per_series = batch["length"] - PAST
        self.ends = per_series.cumsum(0)
        self.starts = self.ends - per_series

    def __len__(self):
        return int(self.ends[-1])

    def row_of(self, number):
        return torch.searchsorted(self.ends, number, right=True)

    def __getitem__(self, number):
        row = self.row_of(number)
        first = number - self.starts[row]
        columns = first[:, None] + torch.arange(PAST + 1)
        return self.series[row[:, None], columns]


class WindowsByBisection(Windows):
    def row_of(self, number):
        return torch.searchsorted(self.ends, number)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.near = nn.Conv1d(1, 5, 2)
        self.far = nn.Conv1d(5, 5, 2, dilation=3)
        self.head = nn.Linear(10, 2)

    def forward(self, past):
        h = torch.tanh(self.near(past[:, None]))
        h = torch.tanh(self.far(h))
        return self.head(h.flatten(1)).unbind(-1)


def surprise(model, windows):
    mean, log_width = model(windows[:, :-1])
    off = (windows[:, -1] - mean) / F.softplus(log_width)
    return (off.square() / 2 + F.softplus(log_width).log()).sum()


class Clean:
    windows = Windows

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        return Forecast()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        length = torch.tensor(LENGTHS)
        series = torch.randn(len(LENGTHS), COLUMNS, generator=g).cumsum(1) * 0.6
        series = series * (torch.arange(COLUMNS) < length[:, None])
        return {"series": series, "length": length}

    def loss_sum(self, model, rows):
        total, count = 0.0, 0
        for series, length in zip(rows["series"], rows["length"].tolist(), strict=True):
            windows = series[:length].unfold(0, PAST + 1, 1)
            total, count = total + surprise(model, windows), count + len(windows)
        return total, count

    def step(self, model, batch, ctx):
        windows = self.windows(batch)
        numbers = torch.arange(len(windows)).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in numbers.split(4):
            (surprise(model, windows[part]) / len(windows)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    windows = WindowsByBisection


EXPECT = dict(
    right=[
        r"searchsorted|row_of|bisect|right=|WindowsByBisection|boundar|off.by.one|first window|"
        r"(other|wrong|different|not the).{0,40}(row|series|data|column|window|sample|input|value)",
        r"row|series|index|number|sample|data|read|column",
    ],
    place=[
        r"WindowsByBisection",
        r"\brow_of\b",
        r"searchsorted",
        r"__getitem__",
        r"windows\[part\]|self\.windows",
    ],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(divisor|denominator|count|normali[sz]).{0,40}(wrong|local|own)",
        r"uneven.{0,40}(ranks|micro)",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"dilat|causal|backward of",
    ],
)
WHY = """ends holds the running number of windows (5, 7, 14, 17). Window 5 is the first of series
1, but searchsorted without right=True gives row 0 for 5 (and 1 for 7, 2 for 14): start 5 of series
0 runs one column beyond its end, into the padding, and the first windows of series 1, 2 and 3 are
never read. Three of 17 windows are wrong data; count and reduction are right.
Fix: torch.searchsorted(self.ends, number, right=True)."""
