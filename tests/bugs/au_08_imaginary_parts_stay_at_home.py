"""Fourier neural operator for a field on a ring of eight points, data parallel on four ranks with two micro-batches each. The spectral weights are kept as pairs of real numbers and read as complex ones (torch.view_as_complex); the
gradients are reduced by hand after the last micro-batch, the spectral ones as complex tensors whose parts are sent in turn because the backend has no complex numbers.

The bug: the real part is summed over the ranks, and the imaginary part is put back as it was before. The imaginary part of the gradient is lost in DDP in pytorch/pytorch issue 158753 (DDP + complex dtype appears to be bugged);
the workaround by parts is that of issues 71613 and 45760.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
POINTS, CHANNELS, MODES = 8, 4, 3
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 5)], [(5, 7), (7, 9)], [(9, 10), (10, 11)]]
ROWS = 11


class SpectralLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral = nn.Parameter(torch.randn(CHANNELS, CHANNELS, MODES, 2) * 0.4)
        self.local = nn.Conv1d(CHANNELS, CHANNELS, 1)

    def forward(self, x):
        weight = torch.view_as_complex(self.spectral)
        modes = torch.fft.rfft(x)[..., 1 : MODES + 1]
        modes = torch.einsum("bim,iom->bom", modes, weight)
        modes = nn.functional.pad(modes, (1, POINTS // 2 - MODES))
        return torch.tanh(torch.fft.irfft(modes, n=POINTS) + self.local(x))


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv1d(1, CHANNELS, 1)
        self.layers = nn.ModuleList(SpectralLayer() for _ in range(2))
        self.read = nn.Conv1d(CHANNELS, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        for layer in self.layers:
            x = layer(x)
        return self.read(x)


def sum_over_ranks(grad, group, real_only):
    """The gradient of a spectral weight: the parts of the complex tensor, one after the other."""
    grad = torch.view_as_complex(grad.contiguous())
    real, imag = grad.real.contiguous(), grad.imag.contiguous()
    dist.all_reduce(real, group=group)
    dist.all_reduce(imag, group=group)
    return torch.view_as_real(torch.complex(real, grad.imag if real_only else imag))


class Clean:
    real_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Operator()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "before": torch.randn(ROWS, 1, POINTS, generator=g),
            "after": torch.randn(ROWS, 1, POINTS, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["before"]) - rows["after"]).square().sum(), rows["after"].numel()

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        for low, high in PARTS[ctx.rank]:
            loss = (model(batch["before"][low:high]) - batch["after"][low:high]).square().sum()
            (loss / batch["after"].numel()).backward()
        for name, p in model.named_parameters():
            if name.endswith("spectral"):
                p.grad = sum_over_ranks(p.grad, group, self.real_only)
            else:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    real_only = True


EXPECT = dict(
    right=[
        r"(?i)spectral",
        r"(?i)(not|never|no|without|missing|un).{0,40}(reduc|summ|averag|all.?reduce)|(reduc|sum|all.?reduce).{0,40}(not|never|missing|left out|lost|dropped)|own (rows|gradient|part|share)|local|partial",
    ],
    place=[r"(?i)spectral"],
    wrong=[
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is|goes) wrong|goes wrong in the (forward|backward) of|backward of .{0,40} is wrong",
        r"(?i)(local|lift|read)\.(weight|bias) (is|are) wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (the )?(first|last) micro.?batch",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone",
    ],
)
WHY = (
    "layers.0.spectral and layers.1.spectral: the entries [..., 0] (real parts) of the gradient are summed over the four ranks and right; the entries [..., 1] (imaginary parts) are never replaced by the sum: the reduced tensor is "
    "thrown away and every rank keeps its own part (its own rows, both micro-batches). So the gradients of these two parameters differ between the ranks; the sum of the ranks' imaginary entries is the right one. All other "
    "parameters, forward, backward, both micro-batches, the divisor 88 and the data are right. Fix: torch.complex(real, imag), or all_reduce of the real view (torch.view_as_real) at once."
)
