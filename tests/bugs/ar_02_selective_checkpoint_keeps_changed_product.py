"""DDP on two ranks with three micro-batches of odd sizes: residual blocks under torch.utils.checkpoint with a selective policy (create_selective_checkpoint_contexts): matrix products are kept (MUST_SAVE), everything else is recomputed
in the backward.

The bug: the block masks and scales the kept product in place, and the check that would have complained was silenced with allow_cache_entry_mutation=True. The recomputation takes the product that was changed already out of the cache and
changes it once more. As in pytorch/pytorch issue 113737 (in-place operations in a selective checkpointing region) and mindspore-ai/hyper-parallel issue 937 (cached tensor mutated, allow_cache_entry_mutation as the way out).
"""

import contextlib
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FEATURES, WIDTH, INNER, CLASSES, BLOCKS = 5, 6, 9, 4, 2
PARTS = [[(0, 3), (3, 4), (4, 6)], [(6, 8), (8, 11), (11, 13)]]
ROWS = 13
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def keep_products(ctx, op, *args, **kwargs):
    if op in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


contexts = functools.partial(
    create_selective_checkpoint_contexts, keep_products, allow_cache_entry_mutation=True
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.in_place = False

    def forward(self, x):
        h = self.up(self.norm(x))
        h = h.mul_(0.5) if self.in_place else h * 0.5
        return x + self.down(torch.sin(h) * torch.tanh(h))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, CLASSES)
        self.recompute = False

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            else:
                x = block(x)
        return self.out(x)


class Clean:
    in_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "x": torch.randn(ROWS, FEATURES, generator=g),
            "y": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["x"]), rows["y"], reduction="sum"), len(rows["y"])

    def distribute(self, model, ctx):
        model.recompute = True
        for block in model.blocks:
            block.in_place = self.in_place
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                logits = model(batch["x"][low:high])
                loss = F.cross_entropy(logits, batch["y"][low:high], reduction="sum")
                (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    in_place = True


EXPECT = dict(
    right=[
        r"(?i)recomput|checkpoint|backward|saved|kept|cache",
        r"(?i)blocks?\b",
        r"(?i)recomput|checkpoint|differ|other (value|activation|input)|in.?place|mutat|chang|twice"
        r"|not (the same|what)|saved",
    ],
    place=[r"(?i)blocks?(\.\d|\[\d)?|checkpoint"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)"
        r"|no_sync .{0,20}wrong",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank \d|rank \d alone|only the (first|last) micro.?batch",
        r"(?i)random|dropout|seed",
        r"(?i)\bout\.(weight|bias) (is|are) wrong",
    ],
)
WHY = (
    "The first forward is right. The selective checkpoint keeps the result of addmm (up) in its cache, and the block then multiplies this very tensor by 0.5 in place, so the cache holds 0.5 * product. In the backward the "
    "block is run again: norm is recomputed, up's product comes from the cache (already halved) and is halved again, so sin, tanh and the input of down see 0.25 * product. The derivatives of the activation and the weight "
    "gradient of down are taken at the wrong point, in both blocks, on both ranks, all micro-batches. Wrong: blocks.*.down.weight, blocks.*.up, blocks.*.norm, blocks' input gradients and hence inp; right: out, down.bias of "
    "the last block. Reduction, no_sync, divisor 13 are right. Fix: h = h * 0.5 out of place (or do not silence the mutation check)."
)
