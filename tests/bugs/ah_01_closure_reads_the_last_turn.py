"""A small dilated convolution network (residual blocks in the form of WaveNet) under DDP on three ranks, two or three micro-batches each (no_sync but for the last). Each block runs under torch.utils.checkpoint (non-reentrant); the loop
over blocks wraps block and dilation in a small function that is handed to checkpoint.

The bug: the function is a plain closure over the loop's variables. It is called again in the backward, when the loop is long over, and then reads block and dilation of the last turn: blocks 0 and 1 are recomputed with block 2. As in
ml-explore/mlx-lm PR #976 (late binding of a closure, every entry sees the last one) and pytorch issue #11944 (several checkpointed segments, only the last gets its gradient); create_custom_forward(module) of many libraries is there to
avoid it.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
STEPS, CHANNELS, WIDTH = 9, 3, 6
DILATIONS = (1, 2, 4)
PARTS = [[(0, 2), (2, 3)], [(3, 5), (5, 6), (6, 8)], [(8, 9), (9, 11)]]
ROWS = 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.now = nn.Conv1d(WIDTH, WIDTH, 1)
        self.past = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)
        self.gate = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x, dilation):
        earlier = F.pad(x, (dilation, 0))[..., : x.shape[-1]]
        h = self.now(x) + self.past(earlier)
        return x + torch.tanh(h) * torch.sigmoid(self.gate(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv1d(CHANNELS, WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in DILATIONS)
        self.leave = nn.Conv1d(WIDTH, CHANNELS, 1)
        self.mode = None

    def forward(self, x):
        x = self.enter(x)
        for block, dilation in zip(self.blocks, DILATIONS):
            if self.mode is None:
                x = block(x, dilation)
            elif self.mode == "bound":
                x = checkpoint(block, x, dilation, use_reentrant=False)
            else:

                def run(h):
                    return block(h, dilation)

                x = checkpoint(run, x, use_reentrant=False)
        return self.leave(x)


class Clean:
    mode = "bound"

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "wave": torch.randn(ROWS, CHANNELS, STEPS, generator=g),
            "next": torch.randn(ROWS, CHANNELS, STEPS, generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["wave"])
        return F.mse_loss(out, rows["next"].to(out.dtype), reduction="sum"), len(rows["wave"])

    def distribute(self, model, ctx):
        model.mode = self.mode
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                out = model(batch["wave"][low:high])
                loss = F.mse_loss(out, batch["next"][low:high].to(out.dtype), reduction="sum")
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    mode = "closure"


EXPECT = dict(
    right=[
        r"(?i)re-?comput|checkpoint|second (run|forward|pass)",
        r"(?i)block|closure|loop|blocks\.[01]",
        r"(?i)other|another|last|different|differ|not (the )?same|instead|weights? of|closure|"
        r"wrong",
    ],
    place=[r"(?i)blocks?\.?\s?\[?[01]|checkpoint|re-?comput"],
    wrong=[
        r"(?i)blocks?\.?\s?\[?2\]?(\.\w+)* .{0,25}(wrong|goes wrong)",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|random|dropout|rng",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)leave\.(weight|bias) (is|are) wrong",
    ],
)
WHY = (
    "The forward is right everywhere. In the backward, checkpoint runs the closure again, when the loop's names `block` and `dilation` stand at the last turn (block 2, dilation 4). Block 2 is recomputed rightly. Blocks 1 and 0 are "
    "recomputed from their right inputs, but with the weights and dilation of block 2: what the backward reads as saved (delayed input, tanh and sigmoid outputs, the convolutions' weights) is that of block 2, so the gradients of "
    "blocks.0 and blocks.1 (all five tensors each) and that of their inputs, thus enter as well, are wrong in direction; leave and blocks.2 are right. All ranks, all micro-batches, all rows. no_sync, DDP's average, divisor 11 are "
    "right. Fix: bind the loop's variables, checkpoint(block, x, dilation) or default arguments."
)
