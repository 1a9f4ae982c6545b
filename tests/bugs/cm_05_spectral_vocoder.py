"""A Vocos-like vocoder head: frames go through two point-wise layers to magnitude and phase, an
inverse real FFT, a window and overlap-add; the sum is divided by the envelope of the squared
windows. Time is cut over sp (3): each rank synthesises its own frames (4, 4 and 3 of 11) and the
loss of its own samples; whole clips in micro-batches of two of three.

Bug: each rank divides its overlap-add by the envelope of its own windows before the sum over the
ranks. At the seams, where frames of two ranks meet, both parts are divided by too little. After
chunked / streaming inverse STFTs with clicks at the borders of the chunks.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
CLIPS, FRAMES, MEL, HIDDEN, FFT, HOP = 3, 11, 5, 7, 12, 4
SAMPLES = (FRAMES - 1) * HOP + FFT
TINY = 1e-3


class SumOverRanks(torch.autograd.Function):
    """Every rank uses its own stretch of the sum: the gradients of the stretches are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


def overlap_add(pieces, first):
    """Frames (n, t, FFT), the first of which is frame number `first`, laid into a whole clip."""
    wave = pieces.new_zeros(pieces.shape[0], SAMPLES)
    where = (torch.arange(pieces.shape[1])[:, None] + first) * HOP + torch.arange(FFT)
    return wave.index_add(1, where.flatten(), pieces.flatten(1))


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(MEL, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, FFT + 2)

    def frames(self, mel):
        x = self.norm(torch.nn.functional.gelu(self.enter(mel)))
        size, phase = self.out(x).chunk(2, -1)
        size = (0.5 * size).exp()
        return torch.fft.irfft(torch.complex(size * phase.cos(), size * phase.sin()), n=FFT)

    def window(self, like):
        n = torch.arange(FFT, dtype=like.dtype)
        return torch.sin(torch.pi * (n + 0.5) / FFT)

    def forward(self, mel):
        pieces = self.frames(mel)
        window = self.window(pieces)
        wave = overlap_add(pieces * window, 0)
        power = overlap_add((window * window).expand(1, FRAMES, FFT), 0)
        return wave / power.clamp(min=TINY)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 51)
        return Vocoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 510)
        return {
            "mel": torch.randn(CLIPS, FRAMES, MEL, generator=g),
            "wave": torch.randn(CLIPS, SAMPLES, generator=g),
        }

    def loss_sum(self, model, rows):
        return (model(rows["mel"]) - rows["wave"]).square().sum(), rows["wave"].numel()

    def synthesise(self, model, mel, first, group):
        pieces = model.frames(mel)
        window = model.window(pieces)
        wave = overlap_add(pieces * window, first)
        power = overlap_add((window * window).expand(1, mel.shape[1], FFT), first)
        dist.all_reduce(power, group=group)
        return SumOverRanks.apply(wave, group) / power.clamp(min=TINY)

    def step(self, model, batch, ctx):
        group, r, n = ctx.group("sp"), ctx.coords["sp"], ctx.axes["sp"]
        own = torch.arange(FRAMES).tensor_split(n)[r]
        lo = int(own[0]) * HOP
        hi = SAMPLES if r == n - 1 else (int(own[-1]) + 1) * HOP
        for rows in torch.arange(CLIPS).split(2):
            wave = self.synthesise(model, batch["mel"][rows][:, own], int(own[0]), group)
            loss = (wave[:, lo:hi] - batch["wave"][rows, lo:hi]).square().sum()
            (loss / batch["wave"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def synthesise(self, model, mel, first, group):
        pieces = model.frames(mel)
        window = model.window(pieces)
        wave = overlap_add(pieces * window, first)
        power = overlap_add((window * window).expand(1, mel.shape[1], FFT), first)
        return SumOverRanks.apply(wave / power.clamp(min=TINY), group)


EXPECT = dict(
    right=[
        r"envelope|window|power|overlap|normali[sz]|divi|weight",
        r"before|own|local|per.rank|each rank|not (summed|reduced|global)|partial|seam|border|"
        r"boundar|edge|without .{0,30}(sum|reduc)|instead of the (sum|global|full)|missing",
        r"synthesise|envelope|power|overlap|window|wave",
    ],
    place=[r"\bsynthesise\b", r"\bpower\b", r"overlap_add", r"SumOverRanks"],
    wrong=[
        r"SumOverRanks.{0,40}backward.{0,30}(wrong|twice|should)",
        r"parameter.{0,40}(twice|not) (summed|reduced)",
        r"phase.{0,30}(wrong|sign)",
        r"(count|numel).{0,30}(local|own)",
        r"(lo|hi|samples).{0,20}off.by.one",
        r"halo.{0,30}(missing|detached)",
    ],
)
WHY = """The inverse STFT is sum of windowed frames / sum of squared windows, both sums over all
frames. Buggy.synthesise divides the rank's own overlap-add by the envelope of its own frames and
sums the quotients over sp: a/p + b/q instead of (a + b)/(p + q) where frames of two ranks overlap.
The waves at the seams and so all gradients are wrong. A right cause says that the envelope
(normaliser) is the own rank's, or is divided before the sum. Fix: sum both, then divide."""
