"""A point-cloud classifier with batch statistics over all ranks, by an own autograd function. After pytorch's SyncBatchNorm with unlike
numbers of rows on the ranks (the backward divided by the world size in place of the true count).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, POINTS, CLASSES, EPS = 11, 6, 5, 1e-5


class SyncNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, means):
        count = x.new_tensor([len(x)])
        dist.all_reduce(count, group=group)
        mean = x.sum(0)
        dist.all_reduce(mean, group=group)
        mean /= count
        variance = (x - mean).square().sum(0)
        dist.all_reduce(variance, group=group)
        inverse = (variance / count + EPS).rsqrt()
        hat = (x - mean) * inverse
        ctx.save_for_backward(hat, inverse, weight, count)
        ctx.group, ctx.means = group, means
        return hat * weight + bias

    @staticmethod
    def backward(ctx, dy):
        hat, inverse, weight, count = ctx.saved_tensors
        sums = torch.stack([dy.sum(0), (dy * hat).sum(0)])
        d_bias, d_weight = sums[0].clone(), sums[1].clone()
        mean, mean_hat = ctx.means(sums, count, len(dy), ctx.group)
        return weight * inverse * (dy - mean - hat * mean_hat), d_weight, d_bias, None, None


class BatchNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.7, 1.4, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x, sync):
        flat = x.flatten(0, 1)
        if sync is None:
            flat = F.batch_norm(flat, None, None, self.weight, self.bias, training=True, eps=EPS)
        else:
            flat = SyncNorm.apply(flat, self.weight, self.bias, *sync)
        return flat.view_as(x)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.bn1 = nn.Linear(3, 8), BatchNorm(8)
        self.mix, self.bn2 = nn.Linear(8, 12), BatchNorm(12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, points, sync=None):
        x = F.gelu(self.bn1(self.lift(points), sync))
        x = F.gelu(self.bn2(self.mix(x), sync))
        return self.head(x.amax(1))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return PointNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        scale = torch.rand(ROWS, 1, 1, generator=g) * 2 + 0.5
        return {
            "points": torch.randn(ROWS, POINTS, 3, generator=g) * scale,
            "kind": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(model(rows["points"]), rows["kind"], reduction="sum")
        return loss, len(rows["kind"])

    @staticmethod
    def means(sums, count, own, group):
        dist.all_reduce(sums, group=group)
        return sums / count

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        logits = model(mine["points"], (ctx.group("dp"), self.means))
        loss = F.cross_entropy(logits, mine["kind"], reduction="sum") / len(batch["kind"])
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    @staticmethod
    def means(sums, count, own, group):
        means = sums / own
        dist.all_reduce(means, group=group)
        return means / dist.get_world_size(group)


EXPECT = dict(
    right=[
        r"bn|norm|statistic|lift|mix",
        r"backward|gradient|mean|count|divisor|uneven|unequal|world size|number of (rows|points)|(bn|norm)\w*.{0,60}(returns|gives|passes)",
    ],
    place=[r"bn[12]|norm|statistic", r"lift|mix"],
    wrong=[
        r"forward (pass )?(is|was) wrong|(output|activation)s? of (the )?(bn|lift|mix|head)\S* .{0,20}(is|was|are) wrong",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"(head|bn2)\S* (is|are|has|have) (a )?wrong",
        r"loss (is|was) (wrong|divided)",
    ],
)
WHY = (
    "The backward of the synchronised batch norm takes the mean of the ranks' own means of dy and dy*xhat in place of the sums over the "
    "true total count. With 4, 4 and 3 clouds on the ranks these differ, so the gradient of the norm's input is slightly wrong on all "
    "ranks: lift, bn1 and mix are wrong; head and bn2 (weight, bias) and the forward are right."
)
