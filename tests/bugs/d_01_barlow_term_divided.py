"""Barlow Twins beside an online probe under DDP; the cross-correlation is that of all ranks. After
FAULTS C07-04 (lightly issue 1977): DDP averages, the gathered term is off by 1/world_size.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, CHANNELS, LENGTH, WIDTH, EMBEDDING, CLASSES = 12, 3, 9, 10, 7, 5
OFF_DIAGONAL, PROBE = 0.05, 0.3


class SumOverRanks(torch.autograd.Function):
    """Every rank computes the same loss from the sum, so each keeps its own part's gradient."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(CHANNELS, WIDTH, 3, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.projector = nn.Sequential(
            nn.Linear(WIDTH, 13), nn.LayerNorm(13), nn.SiLU(), nn.Linear(13, EMBEDDING, bias=False)
        )
        self.probe = nn.Linear(WIDTH, CLASSES)

    def encode(self, x):
        return F.silu(self.conv2(F.silu(self.norm(self.conv1(x))))).mean(-1)

    def forward(self, view1, view2):
        h1, h2 = self.encode(view1), self.encode(view2)
        return self.projector(h1), self.projector(h2), self.probe(h1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"barlow": (self.statistics, self.barlow), "probe": self.probe_sum}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(ROWS, CHANNELS, LENGTH, generator=g)
        return {
            "view1": x + 0.3 * torch.randn(x.shape, generator=g),
            "view2": x.flip(-1) + 0.3 * torch.randn(x.shape, generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    @staticmethod
    def sums(z1, z2):
        return torch.cat(
            [torch.stack([z1.sum(0), z2.sum(0), z1.square().sum(0), z2.square().sum(0)]), z1.T @ z2]
        )

    def barlow(self, sums, n):
        mean1, mean2 = sums[0] / n, sums[1] / n
        std1 = (sums[2] / n - mean1.square() + 0.1).sqrt()
        std2 = (sums[3] / n - mean2.square() + 0.1).sqrt()
        c = (sums[4:] / n - torch.outer(mean1, mean2)) / torch.outer(std1, std2)
        on = (torch.diagonal(c) - 1).square().sum()
        off = c.square().sum() - torch.diagonal(c).square().sum()
        return on + OFF_DIAGONAL * off

    def statistics(self, model, rows):
        z1, z2, _ = model(rows["view1"], rows["view2"])
        return self.sums(z1, z2)

    def probe_sum(self, model, rows):
        _, _, logits = model(rows["view1"], rows["view2"])
        loss = F.cross_entropy(logits, rows["labels"], reduction="sum")
        return PROBE * loss, len(rows["labels"])

    def loss_sum(self, model, rows):
        n = len(rows["labels"])
        z1, z2, logits = model(rows["view1"], rows["view2"])
        probe = F.cross_entropy(logits, rows["labels"], reduction="sum")
        return n * self.barlow(self.sums(z1, z2), n) + PROBE * probe, n

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def mine(self, batch, ctx):
        return {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}

    def barlow_loss(self, z1, z2, ctx):
        return ctx.world_size * self.barlow(SumOverRanks.apply(self.sums(z1, z2)), ROWS)

    def step(self, model, batch, ctx):
        mine = self.mine(batch, ctx)
        z1, z2, logits = model(mine["view1"], mine["view2"])
        loss = self.barlow_loss(z1, z2, ctx) + PROBE * F.cross_entropy(logits, mine["labels"])
        loss.backward()


class Buggy(Clean):
    def barlow_loss(self, z1, z2, ctx):
        return self.barlow(SumOverRanks.apply(self.sums(z1, z2)), ROWS)


EXPECT = dict(
    right=[
        r"barlow|term|projector|correlation|contrastive|auxiliary",
        r"0\.333|1/3|\bthird|averag|\bmean\b|divided|divisor|world.?size|number of ranks|too small"
        r"|scale|factor|coefficient|normali[sz]|weight",
    ],
    place=[r"barlow", r"projector", r"conv", r"term", r"DDP|all.?reduce|world"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"rows? .{0,30}(lost|missing|dropped)",
        r"counted (twice|two times|2 times|3 times|three times)|reduced (twice|again)",
        r"probe\S* (term )?(is scaled|is weighted|is too|is wrong)",
        r"stale|left over|not zeroed",
    ],
)

WHY = (
    "The cross-correlation is summed over the ranks and every rank's gradient of it is only its "
    "own part, yet DDP averages: the Barlow term comes out at 1/3 while the probe's term, a mean "
    "per rank, is right."
)
