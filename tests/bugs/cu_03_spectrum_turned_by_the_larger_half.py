"""An unrolled reconstruction network for magnetic resonance pictures (7 x 9): two turns of a data
consistency step with learned step sizes and a small CNN. Rows over dp (2), the five receiver coils
over the axis coil (3 and 2), two micro-batches. Spectra are kept with frequency zero in the middle.

Bug: the rank's own pair of centred transforms uses fftshift before and after; it needs ifftshift
before the transform. For even sides both are one; these are odd. After MRI code in which the two
shifts were mixed up.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "coil": 2}}}}
ROWS, COILS, HIGH, WIDE = 5, 5, 7, 9
DIMS = (-2, -1)


class Centred:
    def forth(self, x):
        x = torch.fft.fft2(torch.fft.ifftshift(x, dim=DIMS), norm="ortho")
        return torch.fft.fftshift(x, dim=DIMS)

    def back(self, k):
        k = torch.fft.ifft2(torch.fft.ifftshift(k, dim=DIMS), norm="ortho")
        return torch.fft.fftshift(k, dim=DIMS)


class CentredOnRanks(Centred):
    def forth(self, x):
        x = torch.fft.fft2(torch.fft.fftshift(x, dim=DIMS), norm="ortho")
        return torch.fft.fftshift(x, dim=DIMS)

    def back(self, k):
        k = torch.fft.ifft2(torch.fft.fftshift(k, dim=DIMS), norm="ortho")
        return torch.fft.fftshift(k, dim=DIMS)


class ToCoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        g = torch.view_as_real(g).contiguous()
        dist.all_reduce(g, group=ctx.group)
        return torch.view_as_complex(g), None


class FromCoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = torch.view_as_real(x).contiguous()
        dist.all_reduce(x, group=group)
        return torch.view_as_complex(x)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Refine(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv2d(2, 6, 3, padding=1)
        self.down = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x):
        h = torch.view_as_real(x).movedim(-1, 1)
        h = self.down(torch.tanh(self.up(h)))
        return x + torch.view_as_complex(h.movedim(1, -1).contiguous())


class Unrolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(COILS) * 0.3)
        self.rate = nn.Parameter(torch.tensor([0.7, 0.4]))
        self.refine = nn.ModuleList([Refine(), Refine()])
        self.transform, self.coils, self.group = Centred(), slice(None), None

    def enter(self, x):
        return x if self.group is None else ToCoils.apply(x, self.group)

    def leave(self, x):
        return x if self.group is None else FromCoils.apply(x, self.group)

    def combine(self, spectrum, maps):
        return self.leave((maps.conj() * self.transform.back(spectrum)).sum(1))

    def forward(self, measured, maps, seen):
        measured, maps = torch.view_as_complex(measured), torch.view_as_complex(maps)
        measured, maps = measured[:, self.coils], maps[:, self.coils]
        maps = maps * self.gain[self.coils].exp()[:, None, None]
        seen = seen[:, None]
        x = self.combine(seen * measured, maps)
        for rate, refine in zip(self.rate, self.refine, strict=True):
            rest = self.transform.forth(maps * self.enter(x)[:, None]) - measured
            x = refine(x - rate * self.combine(seen * rest, maps))
        return torch.view_as_real(x)


class Clean:
    transform = Centred

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        return Unrolled()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 310)
        return {
            "measured": torch.randn(ROWS, COILS, HIGH, WIDE, 2, generator=g),
            "maps": torch.randn(ROWS, COILS, HIGH, WIDE, 2, generator=g) * 0.4,
            "seen": (torch.rand(ROWS, 1, WIDE, generator=g) < 0.6).float(),
            "picture": torch.randn(ROWS, HIGH, WIDE, 2, generator=g),
        }

    def loss_sum(self, model, rows):
        error = model(rows["measured"], rows["maps"], rows["seen"]) - rows["picture"]
        return error.square().sum(), rows["picture"].shape[0] * HIGH * WIDE

    def distribute(self, model, ctx):
        own = torch.arange(COILS).tensor_split(ctx.axes["coil"])[ctx.coords["coil"]]
        model.coils = slice(int(own[0]), int(own[-1]) + 1)
        model.group = ctx.group("coil")
        model.transform = self.transform()
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / (ROWS * HIGH * WIDE)).backward()
        for name, p in model.named_parameters():
            if name == "gain":
                dist.all_reduce(p.grad, group=ctx.group("coil"))
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    transform = CentredOnRanks


EXPECT = dict(
    right=[
        r"i?fftshift|shift|centred|centered|transform|fft|roll",
        r"ifftshift|odd|shift.{0,40}(twice|both|wrong|inverse|instead|same|off|other)|"
        r"(wrong|other|different|off).{0,40}(shift|roll)|(rolled|shifted|moved) by|CentredOnRanks",
    ],
    place=[
        r"CentredOnRanks",
        r"\bforth\b",
        r"\bback\b",
        r"model\.transform|self\.transform",
        r"fftshift\(",
    ],
    wrong=[
        r"norm=.?.?ortho.{0,30}(wrong|missing)",
        r"conj\w*.{0,30}(missing|wrong)",
        r"(gain|coil).{0,40}(not|twice|missing).{0,20}(reduc|summ)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """A centred transform is fftshift(fft2(ifftshift(x))), likewise back. CentredOnRanks takes
fftshift in both places. For the odd sides 7 and 9 fftshift (by 3 and 4) is not its own inverse, so
the input is moved by one cell too far: the spectrum gets a phase ramp and the picture is shifted;
measured data and mask no longer fit, all gradients are wrong. Collectives and coils are right.
Fix: torch.fft.ifftshift before fft2 and before ifft2."""
