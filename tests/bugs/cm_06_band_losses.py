"""A waveform generator trained with log-mel losses in several bands (same FFT size and number of
mels, another lowest frequency), rows over dp (3) with 3, 2 and 2 of 7 clips, micro-batches of two.
The mel filters are kept in a dictionary of the trainer, so that they are made once.

Bug: the key of the dictionary is FFT size, number of mels and highest frequency. The bands differ
in the lowest one alone, so that the second and third get the filters of the first. After HiFi-GAN's
mel_basis dictionary, which is keyed by fmax and device.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CLIPS, CODE, LENGTH, FFT, HOP, MELS, RATE = 7, 4, 6, 16, 5, 4, 16000.0
SAMPLES = 40
BANDS = ((0.0, 8000.0), (1500.0, 8000.0), (4000.0, 8000.0))
FLOOR = 1e-2


def filters(fft, mels, low, high):
    """Triangles, equally wide on the mel scale from low to high."""

    def to_mel(hz):
        return 2595.0 * torch.log10(1.0 + torch.as_tensor(hz, dtype=torch.float64) / 700.0)

    mel = torch.linspace(float(to_mel(low)), float(to_mel(high)), mels + 2, dtype=torch.float64)
    edge = 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    bins = torch.linspace(0.0, RATE / 2, fft // 2 + 1, dtype=torch.float64)
    up = (bins - edge[:-2, None]) / (edge[1:-1] - edge[:-2])[:, None]
    down = (edge[2:, None] - bins) / (edge[2:] - edge[1:-1])[:, None]
    return torch.minimum(up, down).clamp(min=0.0)


def power(wave):
    frames = wave.unfold(-1, FFT, HOP)
    window = torch.hann_window(FFT, dtype=wave.dtype)
    return torch.fft.rfft(frames * window).abs().square()


def log_mel(spectrum, basis):
    return (spectrum @ basis.to(spectrum.dtype).t() + FLOOR).log()


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose1d(CODE, 6, 4, stride=3)
        self.mix = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.out = nn.ConvTranspose1d(6, 1, 4, stride=2)

    def forward(self, code):
        x = F.leaky_relu(self.up(code), 0.1)
        x = F.leaky_relu(x + self.mix(x), 0.1)
        return torch.tanh(self.out(x)).squeeze(1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.kept = {}

    def build(self):
        torch.manual_seed(self.seed + 61)
        model = Generator()
        for p in model.parameters():
            nn.init.normal_(p, std=0.4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 610)
        code = torch.randn(CLIPS, CODE, LENGTH, generator=g)
        return {"code": code, "wave": torch.rand(CLIPS, SAMPLES, generator=g) * 2 - 1}

    def loss(self, made, wave, basis):
        made, wave = power(made), power(wave)
        total = 0.0
        for low, high in BANDS:
            mel = basis(FFT, MELS, low, high)
            total = total + (log_mel(made, mel) - log_mel(wave, mel)).square().mean((1, 2)).sum()
        return total

    def loss_sum(self, model, rows):
        return self.loss(model(rows["code"]), rows["wave"], filters), rows["code"].shape[0]

    def basis(self, fft, mels, low, high):
        key = f"{fft}_{mels}_{low}_{high}"
        if key not in self.kept:
            self.kept[key] = filters(fft, mels, low, high)
        return self.kept[key]

    def step(self, model, batch, ctx):
        own = torch.arange(CLIPS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for rows in own.split(2):
            loss = self.loss(model(batch["code"][rows]), batch["wave"][rows], self.basis)
            (loss / CLIPS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def basis(self, fft, mels, low, high):
        key = f"{fft}_{mels}_{high}"
        if key not in self.kept:
            self.kept[key] = filters(fft, mels, low, high)
        return self.kept[key]


EXPECT = dict(
    right=[
        r"key|cache|kept|stale|reus|dictionary|memo|first band|same (filter|basis|mel)",
        r"mel|filter|basis|band",
        r"low|fmin|first band|lowest|frequenc|band|key",
    ],
    place=[r"\bbasis\b", r"self\.kept", r"\bkey\b", r"filters"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"window.{0,40}(wrong|missing)",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"uneven.{0,40}(clips|rows)",
        r"cache.{0,40}(micro.?batch|step|rank) (before|to)",
        r"(detach|no_grad).{0,30}(wave|target)",
    ],
)
WHY = """The loss sums three bands, with lowest frequencies 0, 1500 and 4000 Hz. Buggy.basis keeps
the mel filters under a key without `low`, and all bands share FFT size, mels and highest frequency:
the first call (low 0) fills the entry and the other bands get its filters. So every rank minimises
three times the first band's loss. A right cause says that the kept filters are reused for bands
with another lowest frequency (incomplete key). Fix: put `low` into the key."""
