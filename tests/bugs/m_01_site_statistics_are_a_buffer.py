"""Scans from four hospitals, one per rank, harmonised with the mean and the width of the own hospital; DDP. After pytorch issues 22095 and
66504 and the DDP notes on `broadcast_buffers` (module buffers are overwritten with those of rank 0): the statistics become buffers so that
they move with `.to(device)`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
SITES, PER_SITE, FEATURES, WIDTH, CLASSES = 4, 5, 6, 9, 3
MEANS = torch.linspace(-0.8, 1.1, SITES)[:, None] * torch.linspace(0.4, 1.3, FEATURES)
WIDTHS = torch.linspace(0.6, 1.7, SITES)[:, None] + torch.linspace(0.0, 0.3, FEATURES)


class Scan(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, mean=None, width=None):
        mean, width = (self.mean, self.width) if mean is None else (mean, width)
        x = self.norm(torch.tanh(self.first((x - mean) / width)))
        return self.out(x + F.silu(self.second(x)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Scan()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        site = torch.arange(SITES).repeat_interleave(PER_SITE)
        labels = torch.randint(CLASSES, (len(site),), generator=g)
        labels[::7] = -100
        noise = torch.randn(len(site), FEATURES, generator=g)
        return {"x": noise * WIDTHS[site] + MEANS[site], "site": site, "y": labels}

    @staticmethod
    def scan_loss(logits, y):
        return F.cross_entropy(logits, y, ignore_index=-100, reduction="sum")

    def loss_sum(self, model, rows):
        mean, width = (t.to(rows["x"].dtype)[rows["site"]] for t in (MEANS, WIDTHS))
        return self.scan_loss(model(rows["x"], mean, width), rows["y"]), (rows["y"] != -100).sum()

    def keep(self, model, name, value):
        setattr(model, name, value)

    def distribute(self, model, ctx):
        self.keep(model, "mean", MEANS[ctx.rank].to(ctx.dtype))
        self.keep(model, "width", WIDTHS[ctx.rank].to(ctx.dtype))
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v[batch["site"] == ctx.rank] for k, v in batch.items()}
        count = (mine["y"] != -100).sum()
        dist.all_reduce(count)
        loss = self.scan_loss(model(mine["x"]), mine["y"])
        (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    def keep(self, model, name, value):
        model.register_buffer(name, value)


EXPECT = dict(
    right=[
        r"forward|output|activation|input|values? (of|at|in)|buffer|statistic",
        r"first|mean|width|buffer|statistic|input|normali[sz]|rank \W?0",
    ],
    place=[r"ranks? \W?[123]\b", r"first", r"buffer|mean|width|statistic"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (right|exact|correct)",
        r"first wrong .{0,20}(second|out)\b",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own",
    ],
)
WHY = (
    "DDP overwrites the buffers of all ranks with those of rank 0 when it is built, so ranks 1, 2 and 3 harmonise their scans with "
    "the mean and width of hospital 0: their forward is wrong from the input of `first` on. The gradients of all parameters are "
    "wrong, equally on all ranks; only rank 0's rows contribute what they should."
)
