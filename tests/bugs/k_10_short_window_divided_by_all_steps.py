"""Accumulation with DDP; the epoch ends with a window of three micro-batches where four are configured. After FAULTS C12-13 (burn
issue 5695), transformers' reports of the last, incomplete accumulation window, and accelerate's `gradient_accumulation_steps`: the
loss is divided by the configured number.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO_ROWS, ACCUMULATION = 18, 6, 11, 6, 3, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv1d(WIDTH, 2 * WIDTH, 3) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, conv in zip(self.norms, self.convs):
            x = x + F.glu(conv(F.pad(norm(x).mT, (2, 0))), dim=1).mT
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        tokens = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}

    @staticmethod
    def token_loss(model, rows, reduction):
        logits = model(rows["tokens"])
        return F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction=reduction)

    def loss_sum(self, model, rows):
        return self.token_loss(model, rows, "sum"), rows["labels"].numel()

    def distribute(self, model, ctx):
        self.ddp = DistributedDataParallel(model)
        return model

    def window(self, micros):
        return len(micros)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        starts = range(0, len(mine["tokens"]), MICRO_ROWS)
        micros = [{k: v[s : s + MICRO_ROWS] for k, v in mine.items()} for s in starts]
        for i, rows in enumerate(micros):
            last = i + 1 == len(micros)
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                (self.token_loss(self.ddp, rows, "mean") / self.window(micros)).backward()


class Buggy(Clean):
    def window(self, micros):
        return ACCUMULATION


EXPECT = dict(
    right=[
        r"0\.75|3/4|too small|smaller|scale|factor|times",
        r"(all|every|each) (\w+ )?(param|gradient|rank|weight|row)|loss|whole|everything|global|micro|accumul|window",
    ],
    place=[r"(all|every|each)", r"loss", r"param|gradients?", r"rows"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"micro-?batch(es)? .{0,20}(is|are|was|were) (lost|missing|dropped)|(lost|dropped) (a |one )?micro-?batch",
        r"no_sync|padding",
    ],
)
WHY = (
    "The window has three micro-batches, but each mean is divided by the configured four: all gradients are 3/4 of the right ones, "
    "on all ranks. No micro-batch is missing and nothing else is wrong."
)
