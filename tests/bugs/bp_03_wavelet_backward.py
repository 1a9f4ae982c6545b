"""An MWCNN-like denoiser: images go through a 1x1 convolution, a Haar analysis with means and differences along height and width (low = (a + b) / 2, high = a - b), convolutions on the four bands, and a per-pixel
head. Plain DDP on two ranks with three accumulated micro-batches. The ranks run a fused analysis (an autograd Function), the model on its own the plain one.

The bug: the fused analysis' backward is the synthesis (the inverse transform), "as for all orthogonal wavelets", but with means and differences it isn't orthogonal: the adjoint halves the mean's gradient, not the
difference's. After wavelet layers that use the DWT's inverse as backward (pytorch_wavelets / WaveCNet style Functions) with unnormalised filters.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, CHANNELS, HEIGHT, WIDTH, MICRO = 7, 3, 6, 8, 3


def analysis(x, dim):
    a, b = x.unflatten(dim, (-1, 2)).unbind(dim if dim < 0 else dim + 1)
    return (a + b) / 2, a - b


def synthesis(low, high, dim):
    return torch.stack([low + high / 2, low - high / 2], dim).flatten(dim - 1, dim)


def adjoint(low, high, dim):
    return torch.stack([low / 2 + high, low / 2 - high], dim).flatten(dim - 1, dim)


class HaarAnalysis(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, dim):
        fctx.dim = dim
        return analysis(x, dim)

    @staticmethod
    def backward(fctx, low, high):
        return adjoint(low, high, fctx.dim), None


class FusedHaar(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, dim):
        fctx.dim = dim
        return analysis(x, dim)

    @staticmethod
    def backward(fctx, low, high):
        return synthesis(low, high, fctx.dim), None


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, 5, 1)
        self.bands = nn.Conv2d(20, 12, 1)
        self.head = nn.Conv2d(12, 4 * CHANNELS, 1)
        self.split = analysis

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        bands = [b for part in self.split(x, -1) for b in self.split(part.mT, -1)]
        h = F.gelu(self.bands(torch.cat(bands, 1).mT))
        return F.pixel_shuffle(self.head(h), 2)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        clean = torch.rand(ROWS, CHANNELS, HEIGHT, WIDTH, generator=g)
        return {"clean": clean, "noisy": clean + 0.3 * torch.randn(clean.shape, generator=g)}

    def loss_sum(self, model, rows):
        return (model(rows["noisy"]) - rows["clean"]).square().sum(), rows["clean"].numel()

    def wavelet(self, x, dim):
        return HaarAnalysis.apply(x, dim)

    def distribute(self, model, ctx):
        model.split = self.wavelet
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for n in range(MICRO):
            part = {k: v.tensor_split(MICRO)[n] for k, v in mine.items()}
            with contextlib.nullcontext() if n == MICRO - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, part)
                (loss * ctx.world_size / batch["clean"].numel()).backward()


class Buggy(Clean):
    def wavelet(self, x, dim):
        return FusedHaar.apply(x, dim)


EXPECT = dict(
    right=[
        r"backward|adjoint|gradient (of|through|that)|derivative|vjp|way back",
        r"haar|wavelet|analysis|synthesis|inverse|FusedHaar|autograd.?function|custom|\bsplit\b",
    ],
    place=[r"FusedHaar", r"wavelet|synthesis|analysis|\bsplit\b", r"backward"],
    wrong=[
        r"reduc(ed|tion).{0,30}(missing|not|never|twice)|not reduced|missing all.?reduc",
        r"divisor|mean of means|no_sync|world.?size",
        r"forward.{0,20}(is )?wrong|loss (value )?is wrong",
        r"only the last micro.?batch|(wrong|other) rows",
        r"(head|bands)\.(weight|bias) (is|are) wrong",
    ],
)
WHY = (
    "FusedHaar.backward gives the inverse transform (low + high/2, low - high/2) instead of the transposed one (low/2 + high, low/2 - high), so what arrives at the stem is wrong: per application the gradient of the mean is two times too large and that of "
    "the difference two times too small, twice (height and width). The stem's weight and bias are wrong on both ranks and in all micro-batches; bands and head are right, and so are the forward, the loss and DDP's average. A right cause says that the "
    "backward of this custom Function (Haar analysis) isn't the adjoint of its forward. Fix: the transpose."
)
