"""An AlexNet-like classifier whose convolutions are cut by channels over three ranks: conv1 by output channels (3 of 9 each), relu, local response normalisation across channels with a window of five, which
needs two channels of either neighbour, conv2 by input channels with the partial sums added up, mean pool, head. Everyone sees all seven images, in two micro-batches; the cut weights' gradients are
complete on their rank, the rest is the same on all.

The bug: the sharded response normalisation was written after TensorFlow's formula (k + alpha * sum over the window) while the model's nn.LocalResponseNorm divides alpha by the window's size. After the well
known reports about LRN of Caffe, TensorFlow and PyTorch in ported AlexNet/GoogLeNet weights.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
CHANNELS, MIDDLE, OUT, CLASSES, SIDE, ROWS = 2, 9, 6, 4, 5, 7
WINDOW, ALPHA, BETA, K = 5, 0.6, 0.75, 1.0


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, MIDDLE, 3, padding=1)
        self.norm = nn.LocalResponseNorm(WINDOW, ALPHA, BETA, K)
        self.conv2 = nn.Conv2d(MIDDLE, OUT, 3)
        self.head = nn.Linear(OUT, CLASSES)

    def forward(self, images):
        x = self.norm(torch.relu(self.conv1(images)))
        return self.head(torch.relu(self.conv2(x)).mean((2, 3)))


class GatherChannels(torch.autograd.Function):
    @staticmethod
    def forward(fctx, own, rank, world, group):
        fctx.rank, fctx.width, fctx.group = rank, own.shape[1], group
        parts = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=fctx.group)
        return grad.narrow(1, fctx.rank * fctx.width, fctx.width), None, None, None


class SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class ShardedResponse(nn.Module):
    """Local response normalisation of this rank's channels; the window reaches into the neighbours'."""

    def __init__(self, ctx):
        super().__init__()
        self.rank, self.world, self.group = ctx.rank, ctx.world_size, ctx.group("tp")

    def windows(self, squares):
        every = GatherChannels.apply(squares, self.rank, self.world, self.group)
        width, reach = squares.shape[1], WINDOW // 2
        padded = F.pad(every, (0, 0, 0, 0, reach, reach))
        first = self.rank * width
        return sum(padded[:, first + n : first + n + width] for n in range(WINDOW))

    def scale(self, squares):
        return K + ALPHA / WINDOW * self.windows(squares)

    def forward(self, x):
        return x / self.scale(x.square()) ** BETA


class PortedResponse(ShardedResponse):
    def scale(self, squares):
        return K + ALPHA * self.windows(squares)


class Clean:
    response = ShardedResponse

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Tower()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "images": 2 * torch.randn(ROWS, CHANNELS, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["images"]), rows["label"], reduction="sum"), len(
            rows["label"]
        )

    def distribute(self, model, ctx):
        for param, owner, dim in (
            ("weight", "conv1", 0),
            ("bias", "conv1", 0),
            ("weight", "conv2", 1),
        ):
            module = getattr(model, owner)
            part = getattr(module, param).detach().chunk(ctx.world_size, dim)[ctx.rank]
            setattr(module, param, nn.Parameter(part.clone()))
        model.norm = self.response(ctx)
        return model

    def logits(self, model, images, ctx):
        x = F.conv2d(images, model.conv1.weight, model.conv1.bias, padding=1)
        x = model.norm(torch.relu(x))
        x = (
            SumPartial.apply(F.conv2d(x, model.conv2.weight), ctx.group("tp"))
            + model.conv2.bias[:, None, None]
        )
        return model.head(torch.relu(x).mean((2, 3)))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            loss = F.cross_entropy(
                self.logits(model, part["images"], ctx), part["label"], reduction="sum"
            )
            (loss / ROWS).backward()


class Buggy(Clean):
    response = PortedResponse


EXPECT = dict(
    right=[
        r"norm|PortedResponse|scale|response|alpha|window",
        r"forward|alpha|window|divi|formula|output|value|constant|factor|5",
    ],
    place=[r"PortedResponse", r"\bnorm\b", r"ALPHA", r"\bscale\b", r"ShardedResponse"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|missing (all.?)?reduc|wrong group",
        r"mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"own channels only|local channels only|neighbours.{0,20}(missing|not)|backward (formula|of GatherChannels)",
        r"conv[12].{0,20}(computes|is) wrong|bias .{0,20}(times|once per rank)|(wrong|other) rows",
    ],
)
WHY = (
    "PortedResponse.scale computes K + ALPHA * windows; nn.LocalResponseNorm, with which the single process computes, divides alpha by the size of the window, five. So the norm's output is too small on all ranks, in "
    "all rows and both micro-batches, and everything after it: the loss is wrong, and the gradients of all parameters. What goes into the norm (conv1's output), the window sums with the neighbours' channels, the "
    "gather and its backward and the sum of conv2's partial results are right. Fix: ALPHA / WINDOW."
)
