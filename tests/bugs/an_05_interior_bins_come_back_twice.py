"""Long convolutions (Hyena, FNO style) under channel and sequence parallelism on two ranks: every rank has half of the ten samples of all eight channels; an all-to-all gives it all samples of half of the channels, there the real FFT of
the padded
signal is multiplied by the spectrum of a learned kernel, transformed back, and dealt out again. Real FFT and inverse are Functions with a backward of their own (as for libraries without autograd). Three micro-batches of 2, 1 and 2 rows.

The bug: the backward of the real FFT is the inverse real FFT times n. The inverse completes the half spectrum by its mirror image, so that all bins except the first and the last one (Nyquist) come back twice. As the question in
locuslab/pytorch_fft
issue 38 (why is there a '/2' for the backward of rfft?); without that halving the gradient is wrong.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 2}}}}
ROWS, SAMPLES, CHANNELS, OUT = 5, 10, 8, 3
PADDED = 2 * SAMPLES
PARTS = [(0, 2), (2, 3), (3, 5)]


class Exchange(torch.autograd.Function):
    """[rows, own samples, all channels] to [rows, all samples, own channels], or the way back."""

    @staticmethod
    def swap(x, group, give, take):
        size = dist.get_world_size(group)
        out = [part.contiguous() for part in x.chunk(size, give)]
        got = [torch.empty_like(part) for part in out]
        dist.all_to_all(got, out, group=group)
        return torch.cat(got, take)

    @staticmethod
    def forward(ctx, x, group, give, take):
        ctx.group, ctx.give, ctx.take = group, give, take
        return Exchange.swap(x, group, give, take)

    @staticmethod
    def backward(ctx, grad):
        return Exchange.swap(grad, ctx.group, ctx.take, ctx.give), None, None, None


def halves(spectrum, factor):
    """The bins that stand for themselves and their mirror image, times the factor."""
    out = spectrum.clone()
    out[..., 1:-1] *= factor
    return out


class HalfSpectrum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, halve):
        ctx.halve = halve
        return torch.view_as_real(torch.fft.rfft(x, n=PADDED))

    @staticmethod
    def backward(ctx, grad):
        grad = torch.view_as_complex(grad.contiguous())
        grad = halves(grad, 0.5) if ctx.halve else grad
        return torch.fft.irfft(grad, n=PADDED)[..., :SAMPLES] * PADDED, None


class Signal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, spectrum):
        return torch.fft.irfft(torch.view_as_complex(spectrum.contiguous()), n=PADDED)

    @staticmethod
    def backward(ctx, grad):
        return torch.view_as_real(halves(torch.fft.rfft(grad), 2.0) / PADDED)


def product(a, b):
    real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    return torch.stack([real, a[..., 0] * b[..., 1] + a[..., 1] * b[..., 0]], -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(2, CHANNELS), nn.Linear(CHANNELS, OUT)
        self.kernel = nn.Parameter(torch.randn(CHANNELS, SAMPLES) * 0.4)
        self.group, self.halve = None, True

    def forward(self, x):
        x, kernel = F.silu(self.inward(x)), self.kernel
        if self.group is None:
            x = x.transpose(1, 2)
            spectrum = torch.fft.rfft(x, n=PADDED) * torch.fft.rfft(kernel, n=PADDED)
            y = torch.fft.irfft(spectrum, n=PADDED)[..., :SAMPLES].transpose(1, 2)
            return self.outward(torch.tanh(y))
        kernel = kernel.chunk(2)[dist.get_rank(self.group)]
        whole = Exchange.apply(x, self.group, 2, 1).transpose(1, 2)
        spectrum = product(
            HalfSpectrum.apply(whole, self.halve), HalfSpectrum.apply(kernel, self.halve)
        )
        y = Signal.apply(spectrum)[..., :SAMPLES].transpose(1, 2)
        return self.outward(torch.tanh(Exchange.apply(y, self.group, 1, 2)))


class Clean:
    halve = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, SAMPLES, 2, generator=g),
            "y": torch.randn(ROWS, SAMPLES, OUT, generator=g),
        }

    def loss_sum(self, model, rows):
        return F.smooth_l1_loss(model(rows["x"]), rows["y"], reduction="sum"), rows["y"].numel()

    def distribute(self, model, ctx):
        model.group, model.halve = ctx.group("cp"), self.halve
        return model

    def step(self, model, batch, ctx):
        half = SAMPLES // 2
        mine = slice(ctx.rank * half, (ctx.rank + 1) * half)
        for low, high in PARTS:
            x, y = batch["x"][low:high, mine], batch["y"][low:high, mine]
            loss = F.smooth_l1_loss(model(x), y, reduction="sum")
            (loss / batch["y"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    halve = False


EXPECT = dict(
    right=[
        r"(?i)backward|adjoint|gradient (of|that)|hands? (back|on)|derivative",
        r"(?i)HalfSpectrum|kernel|inward|fft|spectr|convol|bins?\b",
    ],
    place=[r"(?i)HalfSpectrum|kernel|inward|fft|spectr"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)outward\.(weight|bias) (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|summed (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)(Exchange|all.?to.?all)\b.{0,30}(wrong|adjoint|backward)",
        r"(?i)Signal\b.{0,30}(wrong|adjoint)",
    ],
)
WHY = (
    "The forward is right on both ranks. The backward of HalfSpectrum (real FFT of the signal and of the kernel) is wrong on both ranks, in all micro-batches and rows: it returns the inverse real FFT of the incoming gradient times 20 "
    "without halving bins "
    "1 to 9 first. So the contributions of bins 1-9 come back twice, those of bin 0 and bin 10 (Nyquist) once: the gradient is twice the right one minus the part of the two outer bins. Wrong are kernel (its own HalfSpectrum) and "
    "inward (everything "
    "in front of the signal's HalfSpectrum); outward is right. Signal's backward, the exchanges and their adjoints, the sum over cp, the divisor 150 and the data are right. Fix: halve the inner bins before the inverse transform."
)
