"""A small language model with hyper-connections (three residual streams a token; each block reads a learnt mixture of them, and writes its output into all with learnt weights after the streams have been
mixed by a learnt matrix) as a pipeline of three stages with two, one and one blocks and four micro-batches of unlike size: all forwards, then all backwards, activations and their gradients sent from
neighbour to neighbour.

The bug: the stages share one function that runs some blocks, and that function copies what comes in into three streams and hands on their sum; so the streams are merged and made equal again between the
stages, where the whole model does so before the first and after the last block only. After the class of reports about multi-stream residuals (hyper-connections, mHC) and pipeline boundaries.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"pp": 3}}}}
WORDS, WIDTH, INNER, STREAMS, LENGTH, ROWS, PARTS = 12, 6, 9, 3, 5, 7, 4
STAGES = [(0, 2), (2, 3), (3, 4)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Parameter(torch.rand(STREAMS))
        self.write = nn.Parameter(torch.rand(STREAMS))
        self.mix = nn.Parameter(torch.eye(STREAMS) * 0.7 + 0.3 * torch.rand(STREAMS, STREAMS))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(2 * WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, streams):
        x = self.norm(torch.einsum("s,sbtd->btd", self.read, streams))
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        x = self.down(torch.tanh(self.up(torch.cat([x, before], -1))))
        return (
            torch.einsum("rs,sbtd->rbtd", self.mix, streams) + self.write[:, None, None, None] * x
        )


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(4)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        streams = self.words(ids).expand(STREAMS, -1, -1, -1)
        for block in self.blocks.values():
            streams = block(streams)
        return self.head(self.norm(streams.sum(0)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Language()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def distribute(self, model, ctx):
        first, last = STAGES[ctx.rank]
        model.blocks = nn.ModuleDict({str(n): model.blocks[str(n)] for n in range(first, last)})
        if ctx.rank > 0:
            del model.words
        if ctx.rank < ctx.world_size - 1:
            del model.norm, model.head
        return model

    def shape(self, rows):
        return (STREAMS, rows, LENGTH, WIDTH)

    def stage(self, model, x, ctx):
        """What comes in (the embeddings, or the streams of the stage before) through this rank's blocks."""
        if ctx.rank == 0:
            x = x.expand(STREAMS, -1, -1, -1)
        for block in model.blocks.values():
            x = block(x)
        return x.sum(0) if ctx.rank == ctx.world_size - 1 else x

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        first, last = ctx.rank == 0, ctx.rank == ctx.world_size - 1
        entered, left = [], []
        for ids, labels in zip(
            batch["ids"].tensor_split(PARTS), batch["labels"].tensor_split(PARTS), strict=True
        ):
            if first:
                x = model.words(ids)
            else:
                x = torch.empty(self.shape(len(ids)), dtype=ctx.dtype)
                dist.recv(x, ctx.rank - 1)
                x.requires_grad_()
            y = self.stage(model, x, ctx)
            if last:
                logits = model.head(model.norm(y))
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                y = loss / batch["labels"].numel()
            else:
                dist.send(y.detach().contiguous(), ctx.rank + 1)
            entered.append(x)
            left.append(y)
        for x, y in zip(entered, left, strict=True):
            if last:
                y.backward()
            else:
                grad = torch.empty(y.shape, dtype=ctx.dtype)
                dist.recv(grad, ctx.rank + 1)
                y.backward(grad)
            if not first:
                dist.send(x.grad.contiguous(), ctx.rank - 1)


class Buggy(Clean):
    def shape(self, rows):
        return (rows, LENGTH, WIDTH)

    def stage(self, model, x, ctx):
        streams = x.expand(STREAMS, -1, -1, -1)
        for block in model.blocks.values():
            streams = block(streams)
        return streams.sum(0)


EXPECT = dict(
    right=[
        r"stream|residual|expand|sum\(0\)|merge|copies|hyper",
        r"stage|boundar|pipeline|between|rank|hand(s|ed)? on|send|sent|recv|received|next",
        r"sum|merg|expand|equal|collaps|averag|shape|copie|one stream|single|instead of|3x|three|differ|forward|other",
    ],
    place=[
        r"\bstage\b",
        r"streams",
        r"blocks\.2",
        r"blocks\.1",
        r"expand",
        r"\bsend\b",
        r"\bsum\b",
    ],
    wrong=[
        r"(gradients?|parameters?) .{0,30}not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read|swapped)|only the last micro.?batch",
        r"backward formula|(wrong|other) rows|gradient of another micro.?batch",
    ],
)
WHY = (
    "Buggy.stage copies what comes in into three equal streams and hands on their sum, at each of the three stages; only the first stage may copy and only the last may sum. So between blocks 1 and 2, and between 2 and "
    "3, the three unlike streams are replaced by three times their sum, and one tensor of a third of the size is sent. The embedding and the streams within the first stage are right; the first wrong value is what stage 0 "
    "hands on (x.sum(0) instead of the streams), or the input of blocks.2 on rank 1. Loss and all gradients on all ranks are wrong; order of micro-batches, returned gradients and the divisor are consistent. Fix: send "
    "all streams, copy on the first stage and sum on the last."
)
