"""A small DETR-like encoder: the position embedding is added at the entry of EVERY block (each layer gets `pos` again), not once at the bottom. Trained with torch's DDP on three ranks with activation checkpointing (use_reentrant=False)
around each block; every rank has its rows, DDP averages, so the loss is multiplied by the number of ranks over the rows of the batch.

The bug: `checkpoint(lambda: block(x, self.place), use_reentrant=False)` in the loop over the blocks. A lambda looks its names up when it is called, and it is called a second time in the backward, when the loop is over (flake8-bugbear B023, "function definition does not bind loop variable"; the usual way to pass keyword
arguments to torch.utils.checkpoint). The arguments of checkpoint itself would have been kept.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PATCHES, CHANNELS, WIDTH, HEADS, INNER, CLASSES, ROWS = 6, 5, 12, 3, 15, 7, 11


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x, place):
        x = x + place
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(CHANNELS, WIDTH)
        self.place = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.recompute = None

    def run(self, x):
        for block in self.blocks:
            x = block(x, self.place)
        return x

    def forward(self, pixels):
        x = self.patch(pixels)
        x = self.run(x) if self.recompute is None else self.recompute(self, x)
        return self.head(self.norm(x).mean(1))


def with_arguments(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, model.place, use_reentrant=False)
    return x


def with_lambda(model, x):
    for block in model.blocks:
        x = checkpoint(lambda: block(x, place=model.place), use_reentrant=False)
    return x


class Clean:
    recompute = staticmethod(with_arguments)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Encoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "pixels": torch.randn(ROWS, PATCHES, CHANNELS, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["pixels"])
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        model.recompute = self.recompute
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss * ctx.world_size / len(batch["label"])).backward()


class Buggy(Clean):
    recompute = staticmethod(with_lambda)


EXPECT = dict(
    right=[
        r"(?i)recomput|checkpoint|re-?run|second (forward|pass|run)|replay",
        r"(?i)differ|other (input|state|value|activation|block|tensor)|not the same|another|inconsisten|no longer|changed|lambda|closure|loop|last block|wrong (input|block|value|activation)|mismatch|not what|does not (give|match|repeat|equal)|instead of|blocks?\.2",
    ],
    place=[r"(?i)blocks?|checkpoint|recomput"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|loss is wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)rows? .{0,20}(never read|read twice|lost|missing)",
        r"(?i)head\.(weight|bias) (is|are) wrong|(only|just) (on )?rank",
        r"(?i)dropout|random (number|state)|rng",
    ],
)
WHY = (
    "The lambda reads `block` and `x` when it is called. In the forward that is right; in the backward (recomputation) the loop is over: block is blocks[2] and x is the output of the last block. All three checkpointed regions therefore recompute blocks[2](output of blocks[2]): saved activations and, for blocks 0 and 1, also the saved weights are those of another block. Shapes agree, so checkpoint's check says nothing. "
    "Forward and loss are right, and so are norm and head. Wrong are the parameters of all three blocks (norm, qkv, out, norm2, up, down; the bias of blocks.2.down, which needs nothing saved, is right) and, through the wrong input gradients, patch.weight, patch.bias and place: in direction, on rows of all three ranks, the same on all ranks after DDP's average. With seed 0 blocks 0 and 1 are wrong by more than their own size (<d, r> / <r, r> of their qkv.weight 0.09 and 0.01), block 2 by 3 to 40 percent, patch.weight 42 percent of its largest element, place 35. "
    "DDP's reduction, the divisor and the rows are right. Fix: pass block, x and place as arguments (or bind them: lambda x=x, block=block: ...)."
)
