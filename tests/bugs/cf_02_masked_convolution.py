"""PixelCNN (masked convolutions, mask A then B) under DistributedDataParallel, three replicas,
two micro-batches.

The bits of small images are predicted in raster order, with the row's own class as a condition;
the mean is over all pixels of the batch. The micro-batches accumulate under no_sync.

The bug: the convolution of the distributed model keeps the mask on the weight's data
(self.weight.data *= self.mask, then an ordinary convolution), as the best known PixelCNN
repositories do; the gradient of the closed taps is not masked by that. Here the weights start
masked, so the forward pass and the loss are the same.
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, SIDE, WIDTH, CLASSES = 8, 5, 6, 4


def raster_mask(weight, kind):
    mask = torch.ones_like(weight)
    k = weight.shape[-1]
    mask[:, :, k // 2, k // 2 + (kind == "B") :] = 0
    mask[:, :, k // 2 + 1 :] = 0
    return mask


class MaskedConv(nn.Conv2d):
    def __init__(self, kind, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", raster_mask(self.weight.data, kind))
        self.weight.data *= self.mask

    def forward(self, x):
        return self._conv_forward(x, self.weight * self.mask, self.bias)


class InPlaceMaskedConv(MaskedConv):
    def forward(self, x):
        self.weight.data *= self.mask
        return super(MaskedConv, self).forward(x)


class PixelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.label = nn.Embedding(CLASSES, WIDTH)
        self.first = MaskedConv("A", 1, WIDTH, 5, padding=2)
        self.blocks = nn.ModuleList(MaskedConv("B", WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.out = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, x, label):
        h = self.first(x) + self.label(label)[:, :, None, None]
        for block in self.blocks:
            h = h + block(torch.tanh(h))
        return self.out(torch.tanh(h))


def bit_loss(model, rows):
    logits = model(rows["image"], rows["label"])
    return nn.functional.binary_cross_entropy_with_logits(logits, rows["image"], reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return PixelNet()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 22)
        return {
            "image": (torch.rand(ROWS, 1, SIDE, SIDE, generator=g) > 0.6).float(),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return bit_loss(model, rows), rows["image"].numel()

    def prepare(self, model):
        return model

    def distribute(self, model, ctx):
        return DistributedDataParallel(self.prepare(model), process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        scale = ctx.world_size / batch["image"].numel()
        for index in range(2):
            piece = {k: v.tensor_split(2)[index] for k, v in own.items()}
            with model.no_sync() if index == 0 else contextlib.nullcontext():
                (bit_loss(model, piece) * scale).backward()


class Buggy(Clean):
    def prepare(self, model):
        for module in model.modules():
            if isinstance(module, MaskedConv):
                module.__class__ = InPlaceMaskedConv
        return model


EXPECT = dict(
    right=[
        r"mask",
        (
            r"\.data|in.?place|outside (of )?autograd|not (a )?part of the graph|(gradient|"
            r"grad)s? (is|are|of|at|for|in|on|to|reach)?.{0,60}(not (be(ing)? )?(masked|zero)|"
            r"non.?zero|unmasked|closed|masked.out)|unmasked gradient|without the mask"
        ),
    ],
    place=[r"masked.?conv", r"weight\.data", r"(first|blocks)\S*\.weight", r"raster_mask"],
    wrong=[
        r"no_sync (is )?(wrong|off)",
        r"mask (type|kind) (A|B) (is )?(taken|used)",
        r"divided by the (wrong|local)",
        r"broadcasts? (the )?buffers?",
    ],
)
WHY = (
    "InPlaceMaskedConv multiplies weight.data by the mask and then convolves with the bare "
    "weight. The closed taps are zero, so outputs, loss and the gradients of all the open taps, "
    "the biases, the label table and the last convolution are right, but autograd knows nothing "
    "of the mask and the weights of the masked convolutions receive nonzero gradients at the "
    "closed taps (future pixels), where the masked product gives zero. These entries enter the "
    "norm that one clips by and the optimiser's moments. A right cause says that the mask is "
    "applied to the data alone, not to the gradient. The fix is to convolve with self.weight * "
    "self.mask (or a hook that masks the gradient)."
)
