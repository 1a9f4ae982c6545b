"""Semi-supervised segmentation with a flip consistency loss: cross entropy of a small convolutional network plus the squared difference between its probabilities and those of the mirrored image, mirrored
back. Images are cut along the width over three ranks (12 columns, 4 each) with exchange of border columns in every convolution. Two micro-batches, gradients summed over the ranks.

The bug: the mirrored view is computed on strips of the mirrored image, so rank r has of it what belongs to strip 2 - r of the image. It is mirrored back with flip on the own strip and compared at once, as
on a single device, without going to the opposite rank. From moving flip augmentations (TTA, consistency) into spatially parallel code.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"width": 3}}}}
ROWS, HEIGHT, COLUMNS, CHANNELS, CLASSES = 5, 5, 12, 6, 3
CONSISTENCY = 2.0


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, CHANNELS, 3, padding=(1, 0))
        self.middle = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=(1, 0))
        self.head = nn.Conv2d(CHANNELS, CLASSES, 1)

    def forward(self, x, border):
        x = torch.tanh(2 * self.stem(border(x)))
        x = x + torch.tanh(2 * self.middle(border(x)))
        return 2 * self.head(x)


def zero_border(x):
    return F.pad(x, (1, 1))


class BorderColumns(torch.autograd.Function):
    """The strip with one column of each neighbour; zeros beyond the image."""

    @staticmethod
    def exchange(left, right, group):
        """What the left and the right neighbour show to this rank."""
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own = torch.stack([left, right]).contiguous()
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own, group=group)
        none = torch.zeros_like(left)
        return (
            parts[rank - 1][1] if rank > 0 else none,
            parts[rank + 1][0] if rank < size - 1 else none,
        )

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        left, right = BorderColumns.exchange(x[..., :1], x[..., -1:], group)
        return torch.cat([left, x, right], -1)

    @staticmethod
    def backward(fctx, grad):
        left, right = BorderColumns.exchange(grad[..., :1], grad[..., -1:], fctx.group)
        inner = grad[..., 1:-1].clone()
        inner[..., :1] += left
        inner[..., -1:] += right
        return inner, None


class OppositeStrip(torch.autograd.Function):
    """The strip of the rank that lies opposite."""

    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return parts[size - 1 - rank]

    @staticmethod
    def backward(fctx, grad):
        return OppositeStrip.forward(fctx, grad, fctx.group), None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Segmenter()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, 2, HEIGHT, COLUMNS, generator=g),
            "mask": torch.randint(CLASSES, (ROWS, HEIGHT, COLUMNS), generator=g),
        }

    def losses(self, plain, mirrored_back, mask):
        consistency = (plain.softmax(1) - mirrored_back.softmax(1)).square().sum()
        return F.cross_entropy(plain, mask, reduction="sum") + CONSISTENCY * consistency

    def loss_sum(self, model, rows):
        plain = model(rows["image"], zero_border)
        mirrored = model(rows["image"].flip(-1), zero_border)
        return self.losses(plain, mirrored.flip(-1), rows["mask"]), rows["mask"].numel()

    def unflip(self, strip, group):
        return OppositeStrip.apply(strip, group).flip(-1)

    def step(self, model, batch, ctx):
        group, rank = ctx.group("width"), ctx.coords["width"]

        def strip(x):
            return x.chunk(ctx.axes["width"], -1)[rank]

        def border(x):
            return BorderColumns.apply(x, group)

        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            plain = model(strip(part["image"]), border)
            mirrored = model(strip(part["image"].flip(-1)), border)
            loss = self.losses(plain, self.unflip(mirrored, group), strip(part["mask"]))
            (loss / batch["mask"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def unflip(self, strip, group):
        return strip.flip(-1)


EXPECT = dict(
    right=[
        r"flip|mirror|opposite|unflip",
        (
            r"own strip|local|opposite|(other|another|wrong|different) (strip|part|column|place|region|position|rank|pixel)|not (exchang|swap|gather|sent|communicat)|without (exchang|swap|going|gather|communicat)|never (exchang|swap|sent)"
            r"|(missing|no|lacks?|omit\w*) .{0,30}(exchange|swap|all.?gather|collective|OppositeStrip)|within (its|the|each) (own )?(strip|rank)|only its own"
        ),
    ],
    place=[r"unflip", r"OppositeStrip", r"mirrored", r"consistency|losses"],
    wrong=[
        r"(parameter|gradient)s?.{0,30}(not reduced|reduced twice|never reduced)",
        r"(halo|border).{0,40}(wrong|missing|detached|stale)|BorderColumns.{0,40}(wrong|missing)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|divisor|mean of means|cross.?entropy .{0,20}wrong",
    ],
)
WHY = (
    "Rank r computes the mirrored view on strip r of the mirrored image, which shows strip 2 - r of the image; unflip turns it over in place and does not exchange it with the opposite rank. On ranks 0 and 2 "
    "the consistency term compares the left strip's probabilities with those of the right strip, and the other way round; on rank 1, its own opposite, it is right, and so is the cross entropy everywhere. A "
    "right cause says that the flip is made within the own strip, without the exchange with the opposite rank. Fix: fetch the opposite strip (with its gradient) before the flip."
)
