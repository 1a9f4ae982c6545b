"""A convolutional net with synchronised batch norm under DDP; the images do not divide by the ranks. After detectron2's
NaiveSyncBatchNorm (stats_mode "" against "N": "otherwise the result is wrong when workers have different batch sizes") and FAULTS
class C18: mean and mean of squares are averaged over the ranks with equal weight.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, CLASSES = 7, 5, 5, 4


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


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))
        self.bias = nn.Parameter(0.2 * torch.randn(WIDTH))

    def forward(self, x, statistics):
        mean, squares = statistics(x)
        scale = self.weight * (squares - mean.square() + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, WIDTH, 3, padding=1), BatchNorm()
        self.conv, self.norm2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False), BatchNorm()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, statistics):
        x = F.relu(self.norm1(self.stem(x), statistics))
        x = F.relu(x + self.norm2(self.conv(x), statistics))
        return self.head(x.mean((2, 3)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        bright = torch.linspace(-1, 1.5, ROWS)[:, None, None, None]
        return {
            "x": torch.randn(ROWS, 3, SIDE, SIDE, generator=g) + bright,
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["x"], lambda x: (x.mean((0, 2, 3)), x.square().mean((0, 2, 3))))
        return F.cross_entropy(logits, rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def statistics(self, x):
        sums = Total.apply(torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))]))
        return (sums / (ROWS * SIDE * SIDE)).unbind()

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        logits = model(mine["x"], self.statistics)
        (F.cross_entropy(logits, mine["y"], reduction="sum") * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def statistics(self, x):
        means = Total.apply(torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))]))
        return (means / dist.get_world_size()).unbind()


EXPECT = dict(
    right=[
        r"norm1|norm|statistic|mean|batch",
        r"forward|output|activation|statistic|uneven|unequal|mean of|weight\w*|values?|coupled|differ\w*",
    ],
    place=[r"norm1", r"norm", r"statistic", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"forward (pass )?(is|was) (right|exact|correct)$",
        r"(output|forward) of (the )?stem\S* (is|was) wrong|first wrong .{0,20}stem",
        r"loss .{0,20}(divided|normali[sz]ed) by (its|the|their) own",
        r"detach|no_grad",
    ],
)
WHY = (
    "Ranks have 3, 2 and 2 images; averaging their means and means of squares with equal weight gives each image of rank 0 weight 1/9 "
    "and the others 1/6 instead of 1/7. The forward is wrong from norm1 on, on all ranks, and so are the gradients of all parameters "
    "but stem.bias, which is zero either way (the norm takes a constant away)."
)
