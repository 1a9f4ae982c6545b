"""A diffusion-like residual block under tensor parallelism by hand (2 data x 2 tensor ranks): the first convolution is cut by output channels, GroupNorm and SiLU work on the own channels, the second convolution is cut by
input channels and its output is summed over the tensor ranks. Predicts noise; two micro-batches, gradients summed over the data ranks.

The bug: the 12 channels make 6 groups of two; the sharded norm keeps the layer's num_groups=6 although it has only 6 of the channels, so that each group is a single channel. After tensor/channel parallel U-Nets
("GroupNorm: num_groups has to be divided by the number of shards", e.g. distributed VAE / DistriFusion style patches).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, SIDE, WIDTH, HIDDEN, GROUPS = 7, 4, 5, 12, 6


class CopyToTensorRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class SumOverTensorRanks(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class ResBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_1 = nn.Conv2d(WIDTH, HIDDEN, 3, padding=1)
        self.norm = nn.GroupNorm(GROUPS, HIDDEN)
        self.conv_2 = nn.Conv2d(HIDDEN, WIDTH, 3, padding=1)
        nn.init.normal_(self.norm.weight, 1, 0.2)
        nn.init.normal_(self.norm.bias, 0, 0.2)

    def forward(self, x):
        return x + self.conv_2(F.silu(self.norm(self.conv_1(x))))


class Unet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Conv2d(3, WIDTH, 1)
        self.block = ResBlock()
        self.outlet = nn.Conv2d(WIDTH, 3, 1)

    def forward(self, x, block=None):
        x = torch.tanh(self.inlet(x))
        return self.outlet((block or self.block)(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Unet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {k: torch.randn(ROWS, 3, SIDE, SIDE, generator=g) for k in ("noisy", "noise")}

    def loss_sum(self, model, rows):
        return (model(rows["noisy"]) - rows["noise"]).square().sum(), rows["noise"].numel()

    def distribute(self, model, ctx):
        size, rank, block = ctx.axes["tp"], ctx.coords["tp"], model.block

        def cut(module, name, dim):
            whole = getattr(module, name).detach()
            setattr(module, name, nn.Parameter(whole.chunk(size, dim)[rank].clone()))

        for module in (block.conv_1, block.norm):
            cut(module, "weight", 0)
            cut(module, "bias", 0)
        cut(block.conv_2, "weight", 1)
        return model

    def group_norm(self, x, norm, ctx):
        groups = norm.num_groups // ctx.axes["tp"]
        return F.group_norm(x, groups, norm.weight, norm.bias, norm.eps)

    def parallel_block(self, block, x, ctx):
        group = ctx.group("tp")
        h = CopyToTensorRanks.apply(x, group)
        h = F.conv2d(h, block.conv_1.weight, block.conv_1.bias, padding=1)
        h = F.silu(self.group_norm(h, block.norm, ctx))
        h = SumOverTensorRanks.apply(F.conv2d(h, block.conv_2.weight, padding=1), group)
        return x + h + block.conv_2.bias[:, None, None]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            out = model(part["noisy"], lambda x: self.parallel_block(model.block, x, ctx))
            ((out - part["noise"]).square().sum() / batch["noise"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def group_norm(self, x, norm, ctx):
        return F.group_norm(x, norm.num_groups, norm.weight, norm.bias, norm.eps)


EXPECT = dict(
    right=[
        r"group.?norm|\bnorm\b|normali[sz]|statistic|mean and|variance",
        r"num_groups|number of groups|groups?\b|channels|statistic|shard|own|local|single",
    ],
    place=[r"group_norm|GroupNorm", r"\bnorm\b", r"parallel_block|block"],
    wrong=[
        r"(not|never) reduced|missing (all.?)?reduc|reduced twice|all.?reduce.{0,30}missing|has to be (summed|reduced) over.{0,10}(tp|tensor)",
        r"divisor|mean of means|own count",
        r"(wrong|other) rows|only the last micro.?batch",
        r"bias.{0,30}(added|counted) (twice|on each)|backward of the",
    ],
)
WHY = (
    "The norm of 12 channels has 6 groups of two channels; each tensor rank has 6 channels, i.e. 3 of the groups, but is told num_groups=6 and so normalises every channel by itself. Forward and all gradients are wrong on all four ranks alike, in both "
    "micro-batches; nothing is missing in communication (groups do not cross the ranks). A right cause must say that the group norm's groups / statistics on the shard are not those of the whole layer (number of groups not divided by tp, statistics over "
    "one channel). Fix: num_groups // tp."
)
