"""An image classifier of convolutions with standardised weights (BiT, NFNet: mean zero and variance one over the whole fan-in of each filter), on two data-parallel by two tensor-parallel ranks (4 and 3
of seven images, two micro-batches). Pairs of convolutions are cut as in Megatron: the first by its output channels, the standardised second by its input channels; mean and variance of a filter are
summed over the tensor-parallel group in a hand-written autograd function, the partial outputs too.

The bug: in the backward of the standardisation the two means (of the gradient, and of the gradient times the standardised weight) are taken over the own input channels only. After the class of reports
about synchronised normalisations whose forward reduces and whose backward does not (apex and timm issues on SyncBatchNorm, weight standardisation under channel parallelism).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, SIDE, CLASSES, EPS = 7, 6, 4, 1e-4


class StandardConv(nn.Conv2d):
    def kernel(self):
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        var = (self.weight - mean).square().mean((1, 2, 3), keepdim=True)
        return (self.weight - mean) * (var + EPS).rsqrt() / (self.in_channels * 9) ** 0.5

    def forward(self, x):
        return F.conv2d(x, self.kernel(), self.bias, padding=1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.mix = StandardConv(6, 5, 3, padding=1)
        self.wide = nn.Conv2d(5, 8, 3, padding=1)
        self.narrow = StandardConv(8, 5, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor([0.8, 1.3]))
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        x = F.silu(self.mix(F.silu(self.stem(x))) * self.gain[0])
        x = x + self.narrow(F.silu(self.wide(x))) * self.gain[1]
        return self.head(x.mean((2, 3)))


class Standardise(torch.autograd.Function):
    """A filter bank of which this rank holds some input channels, to mean 0 and variance 1 over all of them."""

    @staticmethod
    def forward(ctx, weight, fan_in, group):
        total = weight.sum((1, 2, 3), keepdim=True)
        dist.all_reduce(total, group=group)
        centred = weight - total / fan_in
        square = centred.square().sum((1, 2, 3), keepdim=True)
        dist.all_reduce(square, group=group)
        inverse = (square / fan_in + EPS).rsqrt()
        out = centred * inverse
        ctx.save_for_backward(out, inverse)
        ctx.fan_in, ctx.group = fan_in, group
        return out

    @staticmethod
    def backward(ctx, grad):
        out, inverse = ctx.saved_tensors
        sums = torch.stack(
            [grad.sum((1, 2, 3), keepdim=True), (grad * out).sum((1, 2, 3), keepdim=True)]
        )
        dist.all_reduce(sums, group=ctx.group)
        mean, along = sums / ctx.fan_in
        return (grad - mean - out * along) * inverse, None, None


class StandardiseOwn(Standardise):
    @staticmethod
    def backward(ctx, grad):
        out, inverse = ctx.saved_tensors
        mean = grad.mean((1, 2, 3), keepdim=True)
        along = (grad * out).mean((1, 2, 3), keepdim=True)
        return (grad - mean - out * along) * inverse, None, None


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
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


class Clean:
    standardise = Standardise

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["image"]), rows["label"], reduction="sum"), len(
            rows["label"]
        )

    def distribute(self, model, ctx):
        rank = ctx.coords["tp"]
        for conv in (model.stem, model.wide):
            conv.weight = nn.Parameter(conv.weight.detach().chunk(2)[rank].clone())
            conv.bias = nn.Parameter(conv.bias.detach().chunk(2)[rank].clone())
        for conv in (model.mix, model.narrow):
            conv.weight = nn.Parameter(conv.weight.detach().chunk(2, 1)[rank].clone())
        return model

    def by_inputs(self, conv, x, group):
        fan_in = conv.in_channels * 9
        kernel = self.standardise.apply(conv.weight, fan_in, group) / fan_in**0.5
        return Leave.apply(F.conv2d(x, kernel, padding=1), group) + conv.bias[:, None, None]

    def by_outputs(self, conv, x, group):
        return F.conv2d(Enter.apply(x, group), conv.weight, conv.bias, padding=1)

    def forward(self, model, x, group):
        x = F.silu(
            self.by_inputs(model.mix, F.silu(self.by_outputs(model.stem, x, group)), group)
            * model.gain[0]
        )
        x = (
            x
            + self.by_inputs(model.narrow, F.silu(self.by_outputs(model.wide, x, group)), group)
            * model.gain[1]
        )
        return model.head(x.mean((2, 3)))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            logits = self.forward(model, part["image"], ctx.group("tp"))
            (F.cross_entropy(logits, part["label"], reduction="sum") / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    standardise = StandardiseOwn


EXPECT = dict(
    right=[
        r"backward",
        r"standardi[sz]|mean|narrow|mix|StandardiseOwn|sums?\b",
        r"own (input )?(channels|shard|part|slice)|local|not (all.?)?reduced|without .{0,30}reduc|(missing|no|lacks?) .{0,30}(reduc|sum)|shard|tp|tensor.?parallel|global|whole|fan.?in",
    ],
    place=[r"StandardiseOwn", r"standardise", r"\bmix\b", r"narrow", r"by_inputs"],
    wrong=[
        r"forward (is|computes|formula) .{0,20}wrong|mean and variance .{0,40}(forward|own)",
        r"(missing|no|lacks?) .{0,20}reduc\w* .{0,20}(over|across) (the )?dp|not reduced over dp",
        r"micro.?batch(es)? .{0,20}(lost|dropped|never read)|only the last micro.?batch",
        r"mean of means|divi(ded|des) by (its|their) own (rows|images)",
    ],
)
WHY = (
    "StandardiseOwn.backward takes grad.mean and (grad * out).mean over the input channels that this rank holds; the forward's mean and variance are of all channels, so both means must be of all channels, too: "
    "the sums of the two tensor-parallel ranks divided by the whole fan-in. The gradients of mix.weight and narrow.weight are wrong on all four ranks; forward, loss, and the gradients of all other parameters "
    "(stem, wide, gain, head, biases) are right, for the gradient of the input does not pass the standardisation. The reduction over dp and the divisor 7 are right. Fix: all-reduce both sums over tp and divide "
    "by fan_in."
)
