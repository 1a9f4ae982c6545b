"""A Fourier neural operator on two resolutions, its spectral columns cut over tp 2, rows over dp 2.

A spectral layer multiplies the lowest modes by complex weights: one block for the rows of
non-negative frequency, one for those of negative frequency. Each tp rank holds some columns of
modes; the inverse transforms are summed. The loss is on the fine field and on its coarse version.

The bug: the layer writes the two blocks at ``[:modes]`` and ``[-modes:]`` of the spectrum. On the
coarse field (5 rows, 3 modes) these overlap in one row, and the second assignment replaces the
first. After the SpectralConv2d of FNO repositories, whose slices assume a grid of at least twice
as many rows as modes, run at lower resolutions.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}

ROWS, WIDTH, MODES, COLUMNS = 5, 3, 3, 3
FINE, COARSE = (9, 8), (5, 5)


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        shape = (WIDTH, WIDTH, MODES, COLUMNS, 2)
        self.rising = nn.Parameter(torch.randn(shape) * 0.4)
        self.falling = nn.Parameter(torch.randn(shape) * 0.4)
        self.begin, self.group = 0, None

    def rows(self, height):
        return min(MODES, (height + 1) // 2), min(MODES, height // 2)

    def forward(self, x):
        if self.group is not None:
            x = Enter.apply(x, self.group)
        height, width = x.shape[-2:]
        top, bottom = self.rows(height)
        columns = slice(self.begin, self.begin + self.rising.shape[3])
        rising = torch.view_as_complex(self.rising.contiguous())
        falling = torch.view_as_complex(self.falling.contiguous())
        spectrum = torch.fft.rfft2(x, norm="ortho")
        out = torch.zeros_like(spectrum)
        out[:, :, :top, columns] = torch.einsum(
            "bihw,iohw->bohw", spectrum[:, :, :top, columns], rising[:, :, :top]
        )
        out[:, :, -bottom:, columns] = torch.einsum(
            "bihw,iohw->bohw", spectrum[:, :, -bottom:, columns], falling[:, :, MODES - bottom :]
        )
        out = torch.fft.irfft2(out, s=(height, width), norm="ortho")
        return out if self.group is None else Leave.apply(out, self.group)


class CornerSpectral(Spectral):
    def rows(self, height):
        return MODES, MODES


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Conv2d(1, WIDTH, 1)
        self.spectral = nn.ModuleList(Spectral() for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(2))
        self.project = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, x):
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = torch.tanh(spectral(x) + local(x))
        return self.project(x)


class Clean:
    spectral = Spectral

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(71 + self.seed)
        return Operator()

    def batch(self):
        g = torch.Generator().manual_seed(72 + self.seed)
        return {
            "source": torch.randn(ROWS, 1, *FINE, generator=g),
            "field": torch.randn(ROWS, 1, *FINE, generator=g),
        }

    def loss_sum(self, model, rows):
        source, field = rows["source"], rows["field"]
        fine = (model(source) - field).square().mean((1, 2, 3))
        source, field = (F.adaptive_avg_pool2d(v, COARSE) for v in (source, field))
        coarse = (model(source) - field).square().mean((1, 2, 3))
        return (fine + coarse).sum(), field.shape[0]

    def distribute(self, model, ctx):
        own = torch.tensor_split(torch.arange(COLUMNS), ctx.axes["tp"])[ctx.coords["tp"]]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for layer in model.spectral:
            layer.__class__ = self.spectral
            layer.rising = nn.Parameter(layer.rising.detach()[:, :, :, lo:hi].clone())
            layer.falling = nn.Parameter(layer.falling.detach()[:, :, :, lo:hi].clone())
            layer.begin, layer.group = lo, ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        mine = {k: torch.tensor_split(v, 2)[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=ctx.group("dp"))


class Buggy(Clean):
    spectral = CornerSpectral


EXPECT = dict(
    right=[
        (
            r"overlap|overwrit|replac|same row|collid|intersect|twice the modes|"
            r"(fewer|less) (rows )?than|exceed|too (small|few|many)"
        ),
        r"mode|frequenc|spectr|corner|block|fourier|row",
        r"coarse|resolution|height|grid|5 rows|rows? 2|H ?=|small",
    ],
    place=[
        r"CornerSpectral",
        r"Spectral\b",
        r"\brows\(",
        r"\brising\b",
        r"\bfalling\b",
        r"-bottom:|-modes:",
    ],
    wrong=[
        r"(not|never|missing|without).{0,40}(all-?)?reduc|summed (twice|again)",
        r"conjugat|hermitian|imaginary|one-sided|doubl",
        r"columns? (offset|cut|begin)",
        r"divis(or|ion)|normali[sz]|\bortho\b",
    ],
)

WHY = (
    "The two blocks of modes belong to different rows of the spectrum only if there are at least "
    "2 * MODES of them. The coarse field has 5 rows and MODES is 3, so [:3] and [-3:] share row "
    "2, where the block of negative frequencies overwrites what the other had written. The last "
    "row of `rising` gets no gradient from the coarse field and the first row of `falling` one "
    "that it should not have; as the coarse output changes, the other gradients are off too. The "
    "fine field (9 rows) and the cut over tp are right. A right cause says that the slices of "
    "the two mode blocks overlap at the low resolution and the second overwrites the first. The "
    "fix is to clip the numbers of rows by the height, as Spectral.rows does."
)
