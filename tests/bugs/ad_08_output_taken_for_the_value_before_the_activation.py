"""In-place activated normalisation under tensor parallelism (tp 2 x dp 2): after a column-parallel linear a layer norm over all channels (the sums of both tensor ranks) and a leaky ReLU are one Function that keeps its output only, as
InPlace-ABN does (mapillary/inplace_abn), and finds the normalised value again in the backward by inverting activation and affine map; then a row-parallel linear. Two micro-batches, two such blocks.

The bug: the backward inverts the affine map, but not the activation: it takes y for z, so that at negative places the normalised value is wrong (the derivative of the activation is applied rightly). A mistake of own memory-saving norms, in
the manner of InPlace-ABN (mapillary/inplace_abn issue 155 has reports about its backward).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, INPUT, WIDTH, HIDDEN, CLASSES, MICROS, SLOPE, EPS = 11, 5, 7, 10, 4, 2, 0.2, 1e-5


class ActivatedNorm(torch.autograd.Function):
    """leaky_relu(layer_norm(x)) over the channels of all ranks of the group; of its tensors only the output is kept."""

    @staticmethod
    def forward(ctx, x, weight, bias, group, invert):
        n = x.shape[1] * dist.get_world_size(group)
        mean = x.sum(1, keepdim=True)
        dist.all_reduce(mean, group=group)
        centred = x - mean / n
        var = centred.pow(2).sum(1, keepdim=True)
        dist.all_reduce(var, group=group)
        rstd = torch.rsqrt(var / n + EPS)
        y = F.leaky_relu(centred * rstd * weight + bias, SLOPE)
        ctx.save_for_backward(y, weight, bias, rstd)
        ctx.group, ctx.n, ctx.invert = group, n, invert
        return y

    @staticmethod
    def backward(ctx, dy):
        y, weight, bias, rstd = ctx.saved_tensors
        dz = torch.where(y > 0, dy, dy * SLOPE)
        z = torch.where(y > 0, y, y / SLOPE) if ctx.invert else y
        normed = (z - bias) / weight
        g = dz * weight
        sums = torch.cat([g.sum(1, keepdim=True), (g * normed).sum(1, keepdim=True)], 1)
        dist.all_reduce(sums, group=ctx.group)
        mean_g, mean_gn = (sums / ctx.n).split(1, 1)
        return rstd * (g - mean_g - normed * mean_gn), (dz * normed).sum(0), dz.sum(0), None, None


class Enter(torch.autograd.Function):
    """Into the tensor-parallel region: the gradients of the ranks are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.weight = nn.Parameter(1 + 0.5 * torch.rand(HIDDEN))
        self.bias = nn.Parameter(0.5 * torch.randn(HIDDEN))
        self.group, self.invert = None, True

    def forward(self, x):
        if self.group is None:
            return x + self.down(
                F.leaky_relu(
                    F.layer_norm(self.up(x), (HIDDEN,), self.weight, self.bias, EPS), SLOPE
                )
            )
        h = self.up(Enter.apply(x, self.group))
        h = ActivatedNorm.apply(h, self.weight, self.bias, self.group, self.invert)
        return x + Leave.apply(F.linear(h, self.down.weight), self.group) + self.down.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(INPUT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(self.enter(x)))


class Clean:
    invert = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, INPUT, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        group = ctx.group("tp")
        n, r = dist.get_world_size(group), dist.get_rank(group)

        def cut(p, dim):
            return nn.Parameter(p.detach().chunk(n, dim)[r].clone())

        for block in model.blocks:
            block.up.weight, block.up.bias = cut(block.up.weight, 0), cut(block.up.bias, 0)
            block.weight, block.bias = cut(block.weight, 0), cut(block.bias, 0)
            block.down.weight = cut(block.down.weight, 1)
            block.group, block.invert = group, self.invert
        return model

    def step(self, model, batch, ctx):
        dp = ctx.group("dp")
        mine = torch.arange(ROWS).tensor_split(dist.get_world_size(dp))[dist.get_rank(dp)]
        for part in mine.tensor_split(MICROS):
            (
                F.cross_entropy(model(batch["x"][part]), batch["y"][part], reduction="sum") / ROWS
            ).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=dp)


class Buggy(Clean):
    invert = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|hands? (back|on)|gradient (of|to|for) .{0,30}(input|weight)|ActivatedNorm",
        r"(?i)ActivatedNorm|norm|blocks\.[01]\b|activation",
    ],
    place=[r"(?i)ActivatedNorm|blocks\.[01]\.weight|norm|blocks\.1\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(head|blocks\.1\.down)\.(weight|bias) (is|are) wrong|blocks\.1\.bias (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[24]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten|of another)",
        r"(?i)rows? .{0,20}(never read|read twice|dropped)",
        r"(?i)(statistics?|mean|variance) .{0,30}(own|local|shard)",
        r"(?i)only (on )?rank \d|rank \d alone",
    ],
)
WHY = (
    "In the backward of the fused norm + leaky ReLU the normalised value is rebuilt as (y - bias) / weight; at places with y < 0 it must be (y / 0.2 - bias) / weight. So the norm's weight gradient (dz * normed) and the input gradient (through "
    "normed and its mean product with g) are wrong, its bias gradient (dz) and the derivative of the activation are right. Wrong, in direction, on all four ranks, all micro-batches: blocks.1.weight and blocks.1.up.*, and everything before it: "
    "blocks.0.down.*, blocks.0.weight, blocks.0.bias, blocks.0.up.*, enter.*. Right: head.*, blocks.1.down.*, blocks.1.bias. The forward with its two sums over tp, the sums over tp in the backward, the sum over dp, the divisor 11 are right. "
    "It is not an error of the parallelism: one rank alone has it too. Fix: invert the activation first, z = y / slope where y < 0."
)
