"""Classification of utterances under DDP on three ranks, uneven micro-batches. Two convolutions (kernel 3, stride 2, no padding) thin the frames out to about a quarter, then come self-attention over the valid frames, a mean over them, and the
classifier. The valid frames are those that the convolutions make of the utterance's own frames.

The bug: the mask after the convolutions is made by slicing the mask of the padded batch ([:, :-2:2] twice), which for every utterance shorter than the padded width lets one more frame in, one that reaches into the padding. After espnet/espnet issues 3037 (error of calculating x_mask in Conv2dSubsampling)
and 6600 (encoder output length depends on the longest utterance in the batch).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
BANDS, FRAMES, WIDTH, CLASSES = 4, 19, 6, 5
LENGTHS = [19, 11, 7, 15, 9, 19, 13, 17, 8, 12, 19, 16]
PARTS = [[(0, 2), (2, 5)], [(5, 6), (6, 9)], [(9, 11), (11, 12)]]
ROWS = len(LENGTHS)


def thinned(lengths):
    for _ in range(2):
        lengths = (lengths - 3) // 2 + 1
    return lengths


def own_frames(lengths):
    return torch.arange(thinned(FRAMES))[None] < thinned(lengths)[:, None]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(BANDS, WIDTH, 3, stride=2)
        self.second = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.joint, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, speech, valid):
        x = F.silu(self.second(F.silu(self.first(speech.transpose(1, 2))))).transpose(1, 2)
        q, k, v = self.joint(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~valid[:, None], -torch.inf)
        x = x + self.out(scores.softmax(-1) @ v)
        x = (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)
        return self.classifier(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.tensor(LENGTHS)
        inside = torch.arange(FRAMES)[None] < lengths[:, None]
        return {
            "speech": torch.randn(ROWS, FRAMES, BANDS, generator=g) * inside[..., None],
            "lengths": lengths,
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["speech"], own_frames(rows["lengths"]))
        return F.cross_entropy(scores, rows["label"], reduction="sum"), len(scores)

    def valid(self, rows):
        return own_frames(rows["lengths"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                scores = model(rows["speech"], self.valid(rows))
                loss = F.cross_entropy(scores, rows["label"], reduction="sum")
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    def valid(self, rows):
        mask = torch.arange(FRAMES)[None] < rows["lengths"][:, None]
        return mask[:, :-2:2][:, :-2:2]


EXPECT = dict(
    right=[
        r"(?i)mask|valid|length|padd|frame|attention|argument|input",
        r"(?i)forward|mask|valid|length|padd|argument|input|one (more|frame)",
        r"(?i)rows? |rows\b|utterance|micro.?batch|short|padd|forward|argument|input|mask|valid",
    ],
    place=[
        r"(?i)mask|valid|length|padd|attention|joint|\bout\b|classifier|argument|pool|mean over"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left|previous micro",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(first|second)('s)? (forward|backward) (is|goes) wrong|convolutions? (is|are|goes?) wrong|backward of .{0,30} is wrong|adjoint",
        r"(?i)labels? .{0,20}(is|are) wrong|rows? (0|5|10) (is|goes) wrong|recomput|dropout|detach",
    ],
)
WHY = (
    "The mask of valid frames after the two convolutions must follow from each utterance's own length, ((L - 3) // 2 + 1) twice. Buggy.valid slices the mask of the padded width by [:, :-2:2] twice, which keeps ceil(L / 2) frames each time (bounded by "
    "the width), one frame too many in the end for every utterance shorter than the padded 19 frames (for example 11: 3 for 2; 7: 2 for 1). Rows 0, 5 and 10 (19 frames) are right; all other rows are wrong, on all ranks. The convolutions' outputs are right; the "
    "forward goes wrong in the attention (softmax with one key more; first seen at `out`) and in the mean over valid frames. All gradients are wrong. Divisor 12, no_sync and DDP are right. Fix: make the mask from the lengths by the convolutions' formula."
)
