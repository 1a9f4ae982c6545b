"""Acoustic model (time-delay network): spectrogram frames through four gated dilated convolution blocks, each under torch.utils.checkpoint (use_reentrant=False), frame-wise classes of utterances of different lengths, DDP on two ranks
with three micro-batches each (no_sync before the last). The loss is the sum over real frames divided by their number on all ranks.

The bug: the blocks are checkpointed in a loop as checkpoint(lambda y: block(y, mask), x). The lambda looks its `block` up when it is called; in the forward that is the block of this turn, but in the backward, when the loop is long
over, it is the last one. So every block is recomputed by the last block. All shapes agree, so that the check of the recomputed tensors finds nothing. The closure trap of Python's FAQ (lambdas in a loop), as in pytorch/pytorch PR
62726 and ml-explore/mlx-lm PR 976 (late binding).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
BANDS, FRAMES, WIDTH, CLASSES = 5, 9, 6, 7
DILATIONS = [1, 2, 4, 1]
LENGTHS = [9, 6, 4, 9, 7, 5, 8, 3, 9, 6, 7]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 9), (9, 11)]]


class Block(nn.Module):
    def __init__(self, dilation):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=dilation, dilation=dilation)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        h = self.norm(x) * mask
        h = F.glu(self.conv(h.transpose(1, 2)), 1).transpose(1, 2)
        return x + torch.tanh(self.out(h)) * mask


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(BANDS, WIDTH)
        self.blocks = nn.ModuleList([Block(d) for d in DILATIONS])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, sound, length, mode=None):
        mask = (torch.arange(sound.shape[1])[None] < length[:, None])[..., None].to(sound.dtype)
        x = self.front(sound)
        for block in self.blocks:
            if mode == "lambda":
                x = checkpoint(lambda y: block(y, mask), x, use_reentrant=False)
            elif mode == "module":
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(x)


def losses(model, rows, mode):
    scores = model(rows["sound"], rows["length"], mode)
    there = torch.arange(FRAMES)[None] < rows["length"][:, None]
    return F.cross_entropy(scores[there], rows["label"][there], reduction="sum")


class Clean:
    mode = "module"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "sound": torch.randn(rows, FRAMES, BANDS, generator=g),
            "length": torch.tensor(LENGTHS),
            "label": torch.randint(CLASSES, (rows, FRAMES), generator=g),
        }

    def loss_sum(self, model, rows):
        return losses(model, rows, None), int(rows["length"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        frames, parts = sum(LENGTHS), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (losses(model, rows, self.mode) * ctx.world_size / frames).backward()


class Buggy(Clean):
    mode = "lambda"


EXPECT = dict(
    right=[
        r"(?i)block",
        r"(?i)backward|recomput\w*|checkpoint\w*|adjoint|hands? (back|on)|second forward",
        r"(?i)wrong|differ\w*|other|not (the )?(own|right|same)|last|another|module|instead",
    ],
    place=[r"(?i)blocks?\.?(\[?[0-2]\b)?|recomput\w*|checkpoint\w*"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|wrong input",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|(summed"
        r"|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)head(\.(weight|bias))? .{0,12}(is|are) wrong|blocks?\.3.{0,15}(backward )?(is"
        r"|are|goes) wrong",
        r"(?i)dropout|random|mask .{0,15}(is|are) wrong|buffer .{0,25}changed",
    ],
)
WHY = (
    "The forward is right on both ranks and in all micro-batches. In the backward the checkpoints of blocks 0, 1 and 2 are recomputed with block 3 (its norm, convolution and linear weights) on their own inputs: the saved "
    "activations and weights handed to their backward are those of block 3, while the graph (dilation, padding, parameters that receive the gradients) is their own. So the backward of blocks 0, 1, 2 is wrong: their own "
    "parameters get gradients from wrong activations, and what they hand back goes through block 3's weights, so that the gradients of blocks.0, blocks.1, blocks.2 and front are wrong. blocks.3 (recomputed with itself) and "
    "head are right. blocks.2's output gradient is the first right one that meets a wrong module. Frames, labels, divisor, no_sync and DDP's average are right; both ranks have the same wrong result. Fix: checkpoint(block, x, "
    "mask), or bind the block as a default argument of the lambda."
)
