"""transformers' Swin for masked image modelling (SimMIM), under DistributedDataParallel on two
ranks (3 and 2 of 5 pictures), two micro-batches a rank with no_sync for the first. The step takes
the reconstruction from the model and computes the loss itself, as it divides by the hidden pixels
of all pictures.

Bug: the mask of the patches is brought to the size of the picture by `repeat`, which lays copies
of it side by side, and not by `repeat_interleave`, which enlarges each patch. Its number of pixels
is the same. After rewrites of SimMIM's loss (a common mix-up of np.repeat and torch.repeat).
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import SwinConfig, SwinForMaskedImageModeling

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
PICTURES, CHANNELS, GRID, PATCH = 5, 2, 4, 2


def enlarged(mask):
    mask = mask.view(-1, GRID, GRID)
    return mask.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2).unsqueeze(1)


def to_pixels(mask):
    return mask.view(-1, 1, GRID, GRID).repeat(1, 1, PATCH, PATCH)


class Clean:
    spread = staticmethod(enlarged)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        config = SwinConfig(
            image_size=GRID * PATCH,
            patch_size=PATCH,
            num_channels=CHANNELS,
            embed_dim=6,
            depths=[2],
            num_heads=[2],
            window_size=2,
            mlp_ratio=1.5,
            encoder_stride=PATCH,
            drop_path_rate=0.0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
        )
        return SwinForMaskedImageModeling(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 411)
        picture = torch.randn(PICTURES, CHANNELS, GRID * PATCH, GRID * PATCH, generator=g)
        return {"picture": picture, "hidden": torch.rand(PICTURES, GRID**2, generator=g) < 0.45}

    def loss_sum(self, model, rows):
        out = model(pixel_values=rows["picture"], bool_masked_pos=rows["hidden"])
        mask = enlarged(rows["hidden"])
        error = (out.reconstruction - rows["picture"]).abs() * mask
        return error.sum(), mask.sum() * CHANNELS

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        ranks, group = ctx.axes["dp"], ctx.group("dp")
        own = torch.arange(PICTURES).tensor_split(ranks)[ctx.coords["dp"]]
        count = self.spread(batch["hidden"][own]).sum() * CHANNELS
        dist.all_reduce(count, group=group)
        parts = own.tensor_split(2)
        for i, part in enumerate(parts):
            picture, hidden = batch["picture"][part], batch["hidden"][part]
            with nullcontext() if i == len(parts) - 1 else model.no_sync():
                out = model(pixel_values=picture, bool_masked_pos=hidden)
                error = (out.reconstruction - picture).abs() * self.spread(hidden)
                (error.sum() * ranks / count).backward()


class Buggy(Clean):
    spread = staticmethod(to_pixels)


EXPECT = dict(
    right=[
        r"mask|hidden",
        r"repeat|tile|tiling|interleav|enlarg|expan|upsampl|spread|layout|to_pixels|"
        r"(other|wrong) (pixels|positions|places)|mismatch|misalign|not match",
        r"pixel|patch|picture|image|loss|grid",
    ],
    place=[r"to_pixels", r"\bspread\b", r"\.repeat\(", r"error\s*=|\* self\.spread"],
    wrong=[
        r"no_sync.{0,40}(wrong|missing|last|first)",
        r"(count|divisor|normali[sz]er|denominator).{0,40}(local|own|wrong|rank|micro)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"mask.{0,20}(inverted|complement|visible)",
        r"uneven.{0,40}(rows|pictures)",
    ],
)
WHY = """Patch (i, j) covers the pixels 2i..2i+1 x 2j..2j+1, so the mask of 4 x 4 patches becomes
one of 8 x 8 pixels by repeat_interleave along both axes. to_pixels uses repeat, which puts four
copies of the 4 x 4 mask beside each other: the L1 error is taken over other pixels, as many as
there should be, and the divisor stays right. A right cause says that the mask of pixels in the
loss is tiled and does not match the hidden patches. Fix: repeat_interleave (enlarged)."""
