"""Full-iteration replay in the manner of CUDA graphs under DDP on three ranks: the captured step always works on fixed buffers of four rows (ids and labels); for every micro-batch the loader copies its rows into the front of the buffers.
Rows without label carry -100, which the loss ignores. Micro-batches have two to four rows; no_sync for all but the last one; the loss is a sum, scaled by the world size over all label tokens.

The bug: a micro-batch with fewer rows than the buffers hold overwrites the front rows only; what an earlier micro-batch left behind stays in the buffers and counts once more. After the static input buffers of NVIDIA/TransformerEngine
PR 2018 and of Megatron-LM's StaticBufferLoader (full_cuda_graph.py), and pytorch/rl PR 4269 (partial batches in captured steps must be padded and their padding discarded).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SLOTS, TOKENS, VOCABULARY, WIDTH, IGNORED = 21, 4, 4, 9, 6, -100
PARTS = [[(0, 4), (4, 6), (6, 9)], [(9, 11), (11, 15)], [(15, 18), (18, 19), (19, 21)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + torch.tanh(self.convolution(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.norm(x))


class Buffers:
    """The memory a captured step reads from; its addresses and shapes never change."""

    def __init__(self, leave):
        self.ids = torch.zeros(SLOTS, TOKENS, dtype=torch.long)
        self.labels = torch.full((SLOTS, TOKENS), IGNORED)
        self.leave = leave

    def load(self, ids, labels):
        if not self.leave:
            self.ids.zero_()
            self.labels.fill_(IGNORED)
        self.ids[: len(ids)].copy_(ids)
        self.labels[: len(labels)].copy_(labels)
        return {"ids": self.ids, "labels": self.labels}


class Clean:
    leave = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g)
        labels[torch.rand(ROWS, TOKENS, generator=g) < 0.2] = IGNORED
        labels[:, 0] = 1
        return {"ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g), "labels": labels}

    def loss_sum(self, model, rows):
        loss = F.cross_entropy(
            model(rows["ids"]).flatten(0, 1),
            rows["labels"].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        return loss, int((rows["labels"] != IGNORED).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = int((batch["labels"] != IGNORED).sum())
        buffers, parts = Buffers(self.leave), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = buffers.load(batch["ids"][low:high], batch["labels"][low:high])
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    leave = True


EXPECT = dict(
    right=[
        r"(?i)rows?|micro.?batch|label|samples?|examples?",
        r"(?i)twice|again|more than once|repeat|two times|three times|2 times|3 times|double"
        r"|stale|left (over|behind)|earlier|previous|duplicat"
        r"|\b(2|3)(\.0+)?\b.{0,30}(instead of|not|for) 1|too often|once more",
    ],
    place=[r"(?i)rows?|micro.?batch|ranks? ?(0|2)\b|ranks 0 and 2|buffer"],
    wrong=[
        r"(?i)wrong only in the backward|adjoint|own backward (is|goes) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|wrong divisor",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|rows? .{0,20}(lost|dropped|never read|missing)",
        r"(?i)\brank 1 (is|goes) wrong|only (on )?rank 1|all (three )?ranks",
        r"(?i)only (the )?(embed|convolution|norm|head)\b|detach",
        r"(?i)rows of (an)?other ranks?",
    ],
)
WHY = (
    "Rank 0: micro-batch 0 fills all four slots with rows 0-3; micro-batch 1 (rows 4, 5) leaves rows 2 and 3 in slots 2 and 3, micro-batch 2 (rows 6-8) leaves row 3 in slot 3: row 2 counts twice, row 3 three times. Rank 1: its "
    "first micro-batch meets fresh buffers (labels -100) and the second is full: right. Rank 2: micro-batch 0 has rows 15-17; micro-batch 1 (row 18) leaves rows 16, 17 in slots 1, 2, micro-batch 2 (rows 19, 20) leaves row 17 in "
    "slot 2: row 16 counts twice, row 17 three times. All other rows count once, all parameters are concerned, equally on all ranks after DDP's average. Model, backward, scale (all label tokens, each once), no_sync and reduction "
    "are right. Fix: fill the rest of the buffers with padding (labels -100) at every load."
)
