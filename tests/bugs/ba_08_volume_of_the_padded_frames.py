"""A small Glow-TTS-like flow under DDP on two ranks, three micro-batches each of uneven size, cut to their own longest utterance. Two blocks of ActNorm, invertible 1x1 convolution and affine coupling turn a masked mel spectrogram into a
latent whose mean depends on the speaker; the loss is the negative log-likelihood, with the log-determinants of all steps. The divisor is frames times channels of all ranks.

The bug: the invertible convolution counts its log-determinant once for each frame of the padded tensor, not of the utterance. After jaywalnut310/glow-tts issue 17 (the log-determinant of Inv1x1Conv and its x_len, which must be the
sum of the mask).
"""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FRAMES = [6, 9, 4, 5, 5, 7, 3, 8, 6, 10, 2]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 8), (8, 11)]]
CHANNELS, HIDDEN, SPEAKERS, BLOCKS = 4, 6, 3, 2


class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.logs = nn.Parameter(torch.randn(CHANNELS, 1) * 0.2)
        self.bias = nn.Parameter(torch.randn(CHANNELS, 1) * 0.2)

    def forward(self, x, mask):
        return (self.bias + self.logs.exp() * x) * mask, self.logs.sum() * mask.sum((1, 2))


class InvertibleConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        start = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS))[0]
        self.weight = nn.Parameter(start + torch.randn(CHANNELS, CHANNELS) * 0.1)
        self.all_frames = False

    def forward(self, x, mask):
        frames = mask.sum((1, 2))
        if self.all_frames:
            frames = torch.full_like(frames, x.shape[2])
        volume = torch.linalg.slogdet(self.weight)[1] * frames
        return torch.einsum("oc,bct->bot", self.weight, x) * mask, volume


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        half = CHANNELS // 2
        self.start = nn.Conv1d(half, HIDDEN, 3, padding=1)
        self.end = nn.Conv1d(HIDDEN, 2 * (CHANNELS - half), 1)

    def forward(self, x, mask):
        first, second = x.chunk(2, 1)
        shift, logs = self.end(torch.tanh(self.start(first)) * mask).chunk(2, 1)
        logs = torch.tanh(logs) * mask
        second = (shift + logs.exp() * second) * mask
        return torch.cat([first, second], 1), logs.sum((1, 2))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = [ActNorm, InvertibleConvolution, Coupling]
        self.steps = nn.ModuleList(kind() for _ in range(BLOCKS) for kind in kinds)
        self.speaker = nn.Embedding(SPEAKERS, CHANNELS)

    def forward(self, mel, frames, speaker):
        mask = (torch.arange(mel.shape[2])[None] < frames[:, None])[:, None].to(mel.dtype)
        x, volume = mel * mask, 0
        for step in self.steps:
            x, more = step(x, mask)
            volume = volume + more
        distance = ((x - self.speaker(speaker)[:, :, None]) ** 2 * mask).sum((1, 2))
        return 0.5 * distance - volume


class Clean:
    all_frames = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Flow()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "mel": torch.randn(len(FRAMES), CHANNELS, max(FRAMES), generator=g),
            "frames": torch.tensor(FRAMES),
            "speaker": torch.randint(SPEAKERS, (len(FRAMES),), generator=g),
        }

    def loss_sum(self, model, rows):
        values = model(rows["mel"], rows["frames"], rows["speaker"])
        return values.sum(), int(rows["frames"].sum()) * CHANNELS

    def distribute(self, model, ctx):
        for step in model.steps:
            if isinstance(step, InvertibleConvolution):
                step.all_frames = self.all_frames
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = int(batch["frames"].sum()) * CHANNELS
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            rows["mel"] = rows["mel"][:, :, : int(rows["frames"].max())]
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    all_frames = True


EXPECT = dict(
    right=[
        r"(?i)steps\.(1|4)|Invertible|convolution|log.?det|volume|second (output|result)",
        r"(?i)wrong|differ|other|more|too (much|large|many|often)|padd|weight|scale|factor",
    ],
    place=[r"(?i)steps\.(1|4)|Invertible|convolution|log.?det|volume"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)steps\.(0|2|3|5)[^ ]* .{0,25}(is|are) wrong|speaker.{0,20}(is|are) wrong",
        r"(?i)wrong only in the backward|adjoint (is|of).{0,20}wrong",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput",
    ],
)
WHY = (
    "In InvertibleConvolution (steps.1 and steps.4) the log-determinant of a row is multiplied with the width of the padded micro-batch instead of the row's frames. Too much for row 0 on rank 0 (micro-batch 0: 9 for 6) and for rows 6 "
    "(micro-batch 0: 7 for 3), 8 and 10 (micro-batch 2: 10 for 6 and 2) on rank 1; all other rows are right (longest or equally long). The transformed spectrogram (first output of all steps) is right, only the second output (volume) "
    "of steps.1 and steps.4 is not, and the loss with it. The term depends on the weight alone, so only steps.1.weight and steps.4.weight have wrong gradients (too large a share of the log-determinant term), equally on both ranks "
    "after DDP's average; all other parameters are right. Divisor, mask, no_sync and reduction are right. Fix: frames = mask.sum((1, 2))."
)
