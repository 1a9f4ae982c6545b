"""A batch norm written by hand over unequal numbers of rows on three ranks. After detectron2's NaiveSyncBatchNorm (which assumes equal
rows), apex' Welford merge of the ranks' variances and FAULTS C18: the variances of the ranks are averaged with the right weights, but the
distance between the ranks' means is left out.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, CLASSES = 11, 4, 6, 3


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


def own(x):
    """One process: its sums are the sums."""
    return x


def moments(x, total):
    count = total(torch.tensor(float(x[:, 0].numel()), dtype=x.dtype))
    mean = total(x.sum((0, 2, 3))) / count
    centred = x - mean[:, None, None]
    return mean, total(centred.square().sum((0, 2, 3))) / count


def moments_of_ranks(x, total):
    pixels = float(x[:, 0].numel())
    count = total(torch.tensor(pixels, dtype=x.dtype))
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return total(mean * pixels) / count, total(var * pixels) / count


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(0.6 + torch.rand(width)),
            nn.Parameter(0.2 * torch.randn(width)),
        )

    def forward(self, x, statistics, total):
        mean, var = statistics(x, total)
        scale = self.weight * (var + 1e-5).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), BatchNorm(WIDTH)
        self.conv2, self.norm2 = nn.Conv2d(WIDTH, 8, 3, stride=2, bias=False), BatchNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x, statistics=moments, total=own):
        x = F.silu(self.norm1(self.conv1(x), statistics, total))
        x = F.silu(self.norm2(self.conv2(F.pad(x, (1, 0, 1, 0))), statistics, total))
        return self.head(x.mean((2, 3)))


class Clean:
    statistics = staticmethod(moments)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        camera = torch.randn(ROWS, 3, 1, 1, generator=g)
        return {
            "x": camera + torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "kind": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows, *how):
        logits = model(rows["x"], *how)
        return F.cross_entropy(logits, rows["kind"], reduction="sum"), len(rows["kind"])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, self.statistics, Total.apply)
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    statistics = staticmethod(moments_of_ranks)


EXPECT = dict(
    right=[
        r"norm1|norm2|batch.?norm|varianc|statistic",
        r"forward|output|activation|varianc|statistic|values? (of|at|in)|rows of (the )?other|coupl",
    ],
    place=[
        r"norm1",
        r"norm2|batch.?norm|varianc|statistic",
        r"(all|every|each) ranks?|ranks? \W?[012]",
    ],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?conv1\S* (is|was) wrong|first wrong .{0,20}conv1",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own",
        r"no_grad|detach",
    ],
)
WHY = (
    "The variance is the weighted average of the ranks' variances about their own means, without the variance of the means, and so too "
    "small in both batch norms. The forward is wrong from norm1 on, on all "
    "ranks, and with it the gradients of all parameters."
)
