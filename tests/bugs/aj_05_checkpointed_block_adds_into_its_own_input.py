"""Feed-forward blocks under FSDP2 (the whole model in one group) on two ranks with three micro-batches of different size; every block is wrapped in torch's non-reentrant activation checkpoint. A block first adds its own learned place
vectors to its input (as the blocks of DETR add positions in every layer), then does norm, two linear layers and the residual. Blocks take a dictionary with the state (here the hidden vectors only).

The bug: the block adds the places in place (x += places). The checkpoint keeps a reference to the dictionary and its tensor, without a copy or a check of the version, so the recomputation in the backward starts from an input that
already has the places in it and adds them a second time. As discussed for in-place first operations in hpcaitech/ColossalAI PR 1510 (checkpoint of a region that begins with an in-place relu).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
TOKENS, VOCABULARY, WIDTH = 6, 10, 8
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8), (8, 9)]]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.7)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.in_place = False

    def forward(self, state):
        x = state["hidden"]
        if self.in_place:
            x += self.places
        else:
            x = x + self.places
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.saving = False

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            state = {"hidden": x}
            x = checkpoint(block, state, use_reentrant=False) if self.saving else block(state)
        return self.head(x)


class Clean:
    in_place = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "labels": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def distribute(self, model, ctx):
        model.saving = True
        for block in model.blocks:
            block.in_place = self.in_place
        fully_shard(model, mesh=ctx.mesh["dp"])
        return model

    def step(self, model, batch, ctx):
        parts, total = PARTS[ctx.rank], batch["labels"].numel()
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            (self.loss_sum(model, rows)[0] * ctx.world_size / total).backward()


class Buggy(Clean):
    in_place = True


EXPECT = dict(
    right=[
        r"(?i)recomput|checkpoint|second forward|again|re-?run|replay",
        r"(?i)blocks?\b|places|norm|input",
    ],
    place=[r"(?i)blocks?\b"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the (first )?forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)dropout|random|rng|seed",
        r"(?i)head\.(weight|bias) (is|are) wrong",
        r"(?i)gradient.?sync.{0,30}(wrong|missing|too (early|late))",
    ],
)
WHY = (
    "The forward (and the loss) is right on both ranks, in all micro-batches and blocks. The recomputation of every checkpointed block is wrong: x += places has changed the saved input (the output of the embedding or of the block "
    "before), so the block is recomputed with input + 2 * places instead of input + places. Norm, up, gelu and down then have other inputs in the backward than in the forward. Wrong are blocks.*.norm, up, down and (through the "
    "gradient handed back) places and embed; head.weight and head.bias are right, and so is blocks.2.down.bias, which sees the right gradient only. Both ranks, all micro-batches and rows, with the same wrong result after FSDP2's "
    "reduce-scatter. Divisor 54, gradient sync in the last micro-batch, reduction are right. Fix: x = x + places (or a clone) in the checkpointed block."
)
