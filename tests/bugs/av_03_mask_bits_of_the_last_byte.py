"""Data parallelism on three ranks (5, 7 and 3 rows) with micro-batches of at most two rows and a memory-saving ReLU: an own autograd Function keeps only one bit per element, packed eight to a byte, and unpacks the mask in the backward.
Two layers of 6 and 10 wide use it; gradients of the sums over all rows are all-reduced by hand.

The bug: the flattened mask is cut to a multiple of eight before packing (numel // 8 bytes) and the missing rest is filled with zeros when it is unpacked; the last elements of a tensor whose size is no multiple of eight get no gradient.
After requests and reports on bit-packed masks, apache/mxnet PR 16735 (single bit for the mask in dropout: maskIdx = i / 8) and pytorch/pytorch issue 32867 (the packed shape is a ceil).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
OWN, MICRO, FEATURES = [5, 7, 3], 2, 4


def pack(mask, whole_bytes_only):
    bits = mask.flatten().to(torch.uint8)
    if whole_bytes_only:
        bits = bits[: bits.numel() // 8 * 8]
    else:
        bits = torch.cat([bits, bits.new_zeros(-bits.numel() % 8)])
    powers = 2 ** torch.arange(8)
    return (bits.view(-1, 8) * powers).sum(1).to(torch.uint8)


def unpack(packed, shape):
    bits = (packed[:, None].long() >> torch.arange(8)) & 1
    bits = bits.flatten().bool()
    number = shape.numel()
    if bits.numel() < number:
        bits = torch.cat([bits, bits.new_zeros(number - bits.numel())])
    return bits[:number].view(shape)


class BitReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, whole_bytes_only):
        ctx.packed, ctx.shape = pack(x > 0, whole_bytes_only), x.shape
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        return grad * unpack(ctx.packed, ctx.shape), None


class Activation(nn.Module):
    packed, whole_bytes_only = False, False

    def forward(self, x):
        return BitReLU.apply(x, self.whole_bytes_only) if self.packed else torch.relu(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.relu1 = nn.Linear(FEATURES, 6), Activation()
        self.second, self.relu2 = nn.Linear(6, 10), Activation()
        self.out = nn.Linear(10, 2)

    def forward(self, x):
        return self.out(self.relu2(self.second(self.relu1(self.first(x)))))


class Clean:
    whole_bytes_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = sum(OWN)
        return {
            "x": torch.randn(rows, FEATURES, generator=g),
            "y": torch.randn(rows, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"])

    def distribute(self, model, ctx):
        for activation in (model.relu1, model.relu2):
            activation.packed, activation.whole_bytes_only = True, self.whole_bytes_only
        return model

    def step(self, model, batch, ctx):
        first = sum(OWN[: ctx.rank])
        for part in torch.arange(first, first + OWN[ctx.rank]).split(MICRO):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / sum(OWN)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    whole_bytes_only = True


EXPECT = dict(
    right=[
        r"(?i)BitReLU|relu[12]?|activation",
        r"(?i)backward|adjoint|gradient (of|that|for)|hands? (back|on)|mask",
    ],
    place=[r"(?i)BitReLU|relu[12]|activation|unpack|pack"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)out\.(weight|bias) (is|are) wrong|input data .{0,20}wrong",
    ],
)
WHY = (
    "The forward is right. In the backward of BitReLU the last numel % 8 elements of a micro-batch's tensor have mask zero. relu1 is 6 wide: 12 elements for two rows (the last 4, features 2-5 of the second row, are lost), 6 for "
    "one row (less than a byte: all are lost). relu2 is 10 wide: 20 elements for two rows (the last 4, features 6-9 of the second row), 10 for one row (the last 2, features 8 and 9). All ranks: every micro-batch of two rows, and "
    "the single rows 4, 11 and 14 which end each rank's share. So the gradients of second (through relu2) and first (through both) are too small; out is right. Micro-batches, divisor 15 and the all-reduce are right. Fix: pad the "
    "bits to a multiple of eight before packing (ceil), and cut after unpacking."
)
