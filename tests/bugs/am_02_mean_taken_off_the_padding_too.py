"""Speech enhancement under DDP on three ranks (two micro-batches, no_sync for the first): a masked convolution network estimates the clean wave, the loss is the negative SI-SNR of every utterance. A micro-batch is cut to its longest
utterance. The divisor is the number of utterances of all ranks.

The bug: SI-SNR takes the mean (over the utterance's own samples) off estimate and target, and does not mask again. The padded samples, zero before, are now minus the mean, and they count in the products and energies: an utterance's
loss depends on the padding. As in requests for masks in SI-SNR losses, Lightning-AI/torchmetrics issue 1735; SpeechBrain's and ESPnet's versions multiply by the mask once more.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SAMPLES, WIDTH = 24, 5
LENGTHS = [24, 15, 20, 11, 20, 9, 17, 22, 13, 24, 12, 18]
PARTS = [[(0, 2), (2, 5)], [(5, 7), (7, 9)], [(9, 11), (11, 12)]]


class Enhancer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Conv1d(1, WIDTH, 5, padding=2)
        self.middle = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)
        self.decoder = nn.Conv1d(WIDTH, 1, 5, padding=2)

    def forward(self, noisy, mask):
        x = torch.tanh(self.encoder(noisy[:, None])) * mask[:, None]
        x = (x + F.silu(self.middle(x))) * mask[:, None]
        return self.decoder(x)[:, 0] * mask


def si_snr(estimate, target, mask, again):
    length = mask.sum(1, keepdim=True)
    estimate = estimate - (estimate * mask).sum(1, keepdim=True) / length
    target = target - (target * mask).sum(1, keepdim=True) / length
    if again:
        estimate, target = estimate * mask, target * mask
    scale = (estimate * target).sum(1, keepdim=True) / (target.square().sum(1, keepdim=True) + 1e-6)
    wanted = scale * target
    noise = estimate - wanted
    return 10 * torch.log10(wanted.square().sum(1) / (noise.square().sum(1) + 1e-6) + 1e-6)


def enhancement_loss(model, rows, again):
    longest = int(rows["length"].max())
    noisy, clean = rows["noisy"][:, :longest], rows["clean"][:, :longest]
    mask = (torch.arange(longest)[None] < rows["length"][:, None]).to(noisy.dtype)
    noisy, clean = noisy * mask, clean * mask
    return -si_snr(model(noisy, mask), clean, mask, again).sum()


class Clean:
    again = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Enhancer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        clean = torch.randn(rows, SAMPLES, generator=g).cumsum(1) * 0.4 + 0.8
        return {
            "clean": clean,
            "noisy": clean + torch.randn(rows, SAMPLES, generator=g) * 0.5,
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        return enhancement_loss(model, rows, True), len(rows["length"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = len(batch["length"])
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (enhancement_loss(model, rows, self.again) * ctx.world_size / count).backward()


class Buggy(Clean):
    again = False


EXPECT = dict(
    right=[
        r"(?i)loss|SI.?SNR|padd|short|length|mask",
        r"(?i)padd|mask|short|length|rows? |utterance|longest|trim|cut",
    ],
    place=[r"(?i)loss|si.?snr|padd|mask|length|rows?"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)divi(ded|des) by (its|their) own|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)forward (of (the )?)?(encoder|middle|decoder) (is|goes) wrong|wrong only in the backward",
        r"(?i)only (on )?rank [02]\b|all rows (are )?wrong|no_sync .{0,20}(wrong|missing)",
        r"(?i)dropout|stale|recomput",
    ],
)
WHY = (
    "The network's forward is right on all ranks. The loss of an utterance that is shorter than its micro-batch's longest is wrong: after the mean is taken off, its padded samples are -mean in estimate and target and count in <e, t>, "
    "|t|^2 and the noise. Rank 0: micro-batch 0 row 1 (15 of 24), micro-batch 1 row 3 (11 of 20); rows 0, 2, 4 are right. Rank 1: row 5 (9 of 17) and row 8 (13 of 22); rows 6, 7 right. Rank 2: row 10 (12 of 24); rows 9 and 11 (alone) "
    "right. So 5 of 12 utterances have a wrong gradient at the output of the decoder, and all parameters are wrong equally on all ranks after DDP's average. Divisor 12, no_sync, reduction, the network's masks are right. Fix: multiply "
    "estimate and target by the mask again after taking the mean off."
)
