"""Speech recognition with CTC under DDP on three ranks, two micro-batches each (no_sync for the first): two convolutions (kernel 3, stride 2, no padding) shorten the frames, a transformer layer attends over the frames that are there, CTC
takes as many frames as the mask has. Each micro-batch is cut to its own longest utterance. Mean over the target tokens of all ranks.

The bug: the mask follows the convolutions by slicing, mask[:, :-2:2][:, :-2:2], which takes the border off at the end of the padded width. An utterance that is shorter than its micro-batch keeps one frame or more whose window reaches
into the padding. As in espnet/espnet issue 3037 (and 6600 / PR 6633) and wenet-e2e/wenet issue 1513.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
BANDS, WIDTH, TOKENS, LONGEST = 4, 8, 6, 27
FRAMES = [27, 21, 16, 22, 17, 26, 18, 25, 21, 20]
TARGETS = [3, 2, 1, 3, 2, 3, 1, 2, 3, 2]
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)], [(7, 9), (9, 10)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(BANDS, WIDTH, 3, stride=2)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 12, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(WIDTH, TOKENS)
        self.sliced = False

    def forward(self, sound, frames):
        there = torch.arange(sound.shape[1])[None] < frames[:, None]
        x = F.silu(self.second(F.silu(self.first(sound.transpose(1, 2))))).transpose(1, 2)
        if self.sliced:
            there = there[:, :-2:2][:, :-2:2]
        else:
            left = ((frames - 1) // 2 - 1) // 2
            there = torch.arange(x.shape[1])[None] < left[:, None]
        x = self.layer(x, src_key_padding_mask=~there)
        return self.head(x).log_softmax(-1), there.sum(1)


def ctc(model, rows):
    width = int(rows["frames"].max())
    scores, left = model(rows["sound"][:, :width], rows["frames"])
    return F.ctc_loss(scores.transpose(0, 1), rows["target"], left, rows["tokens"], reduction="sum")


class Clean:
    sliced = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(FRAMES)
        frames = torch.tensor(FRAMES)
        sound = torch.randn(rows, LONGEST, BANDS, generator=g)
        there = torch.arange(LONGEST)[None] < frames[:, None]
        steps = torch.randint(1, TOKENS - 1, (rows, max(TARGETS)), generator=g)
        return {
            "sound": sound * there[..., None],
            "frames": frames,
            "target": steps.cumsum(1) % (TOKENS - 1) + 1,
            "tokens": torch.tensor(TARGETS),
        }

    def loss_sum(self, model, rows):
        return ctc(model, rows), int(rows["tokens"].sum())

    def distribute(self, model, ctx):
        model.sliced = self.sliced
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int(batch["tokens"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (ctc(model, rows) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    sliced = True


EXPECT = dict(
    right=[
        r"(?i)mask|padd|length|layer|attention|self_attn|frames?",
        r"(?i)forward|input|output|values?|mask|padd|frames?",
        r"(?i)rows?|utterance|micro.?batch|short|ranks?|batch",
    ],
    place=[r"(?i)layer|attention|self_attn|mask|padd"],
    wrong=[
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward|own backward",
        r"(?i)(first|second)[^.;]{0,25} forward (is|goes) wrong|convolution.{0,30}output.{0,15}wrong|forward goes wrong (in|at) (first|second)\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|(target )?labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "In every micro-batch with utterances of unlike length the shorter one keeps too many frames: rank 0 micro-batch 0 (27 and 21 frames): row 1 has (21 - 1) // 2 = 10, (10 - 1) // 2 = 4 frames, the sliced mask keeps 6; micro-batch 1 "
    "(16 and 22): row 2 has 3, keeps 4; rank 1 micro-batch 1 (26 and 18): row 6 has 3, keeps 5; rank 2 micro-batch 0 (25 and 21): row 8 has 4, keeps 5. The longest row of a micro-batch and rows alone (rank 1 micro-batch 0, rank 2 "
    "micro-batch 1) are right. The convolutions' outputs are right; the mask that goes into the transformer layer is not, so these rows attend to frames that contain padding, and CTC runs over the extra frames. The gradients of all "
    "parameters are wrong, equally on all ranks after DDP's average. Targets, divisor 22, no_sync and reduction are right. Fix: rebuild the mask from each row's own length by the formula of the convolutions, ((n - 1) // 2 - 1) // 2."
)
