"""An image classifier with a hand-written synchronised batch norm. Modelled on the reports on own SyncBN ports (inplace_abn, mmcv, apex;
PyTorch's keeps grad_weight apart from the sums that it all-reduces): the affine gradients are read from the sums after the
all-reduce, and the training loop sums the gradients of all parameters once more.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, CLASSES, EPS = 10, 5, 6, 4, 1e-3


class SyncNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, module):
        over = 0, 2, 3
        sums = torch.stack(
            [x.sum(over), x.square().sum(over), torch.full_like(weight, x.numel() / x.shape[1])]
        )
        dist.all_reduce(sums)
        mean, count = sums[0] / sums[2], sums[2]
        scale = (sums[1] / count - mean.square() + EPS).rsqrt()
        normed = (x - mean[:, None, None]) * scale[:, None, None]
        ctx.module = module
        ctx.save_for_backward(normed, weight, scale, count)
        return normed * weight[:, None, None] + bias[:, None, None]

    @staticmethod
    def backward(ctx, grad):
        normed, weight, scale, count = ctx.saved_tensors
        sums = torch.stack([grad.sum((0, 2, 3)), (grad * normed).sum((0, 2, 3))])
        d_bias, d_weight = ctx.module.reduce(sums)
        by_mean, by_scale = (s[:, None, None] for s in sums / count)
        d_x = (weight * scale)[:, None, None] * (grad - by_mean - normed * by_scale)
        return d_x, d_weight, d_bias, None


class Norm(nn.BatchNorm2d):
    synced = False

    def __init__(self, width):
        super().__init__(width, eps=EPS, track_running_stats=False)

    def forward(self, x):
        return (
            SyncNorm.apply(x, self.weight, self.bias, self) if self.synced else super().forward(x)
        )


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), Norm(WIDTH)
        self.second, self.norm2 = nn.Conv2d(WIDTH, WIDTH + 2, 3, bias=False), Norm(WIDTH + 2)
        self.head = nn.Linear(WIDTH + 2, CLASSES)
        for norm in (self.norm1, self.norm2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)

    def forward(self, x):
        x = F.silu(self.norm1(self.first(x)))
        return self.head(F.silu(self.norm2(self.second(x))).mean((2, 3)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, 3, SIDE, SIDE, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    @staticmethod
    def reduce(sums):
        """All-reduces in place; returns the gradients of bias and weight."""
        affine = sums.clone()
        dist.all_reduce(sums)
        return affine

    def distribute(self, model, ctx):
        for norm in (model.norm1, model.norm2):
            norm.synced, norm.reduce = True, self.reduce
        return model

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    @staticmethod
    def reduce(sums):
        dist.all_reduce(sums)
        return sums


EXPECT = dict(
    right=[
        r"norm",
        r"\b3\b|three|thrice|twice|again|double|second time|number of ranks|world.?size|more than once|already|times too",
    ],
    place=[r"norm1|norm2|norm"],
    wrong=[
        r"(first|second|head)\.\S+ (is|are|has|have) (a )?wrong",
        r"(never|not) (been )?(all.?)?(reduced|summed|averaged)",
        r"forward (pass )?(is|was) wrong",
        r"(all|every) parameters? (is|are) (wrong|scaled|too large)",
        r"statistics? .{0,25}(of the )?own rows|mean of (the )?means",
    ],
)
WHY = (
    "The backward of the norm returns weight and bias gradients that are already summed over the 3 ranks, and the step sums them again: "
    "norm1 and norm2 weight and bias are 3 times too large on all ranks. The gradient of the input, the convolutions and the head are "
    "right."
)
