"""A language model with a z-loss, accumulated over micro-batches under DDP with no_sync.
After FAULTS C10-08: the auxiliary term is added per micro-batch without the factor."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, WIDTH, VOCAB, MICRO, Z = 12, 5, 8, 13, 3, 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + F.silu(self.fc(self.norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


class Clean:
    num_microbatches = MICRO

    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"lm": self.lm, "z_loss": self.z_loss}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(VOCAB, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths, -100),
        }

    @staticmethod
    def lm(model, rows):
        logits, labels = model(rows["ids"]).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()

    @staticmethod
    def z_loss(model, rows):
        return Z * model(rows["ids"]).logsumexp(-1).square().sum(), rows["ids"].numel()

    def loss_sum(self, model, rows):
        (lm, count), (z, all_tokens) = self.lm(model, rows), self.z_loss(model, rows)
        return lm + count * z / all_tokens, count

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.chunk(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"] != -100).sum()
        dist.all_reduce(count)
        for i in range(MICRO):
            micro = {k: v.chunk(MICRO)[i] for k, v in mine.items()}
            last = i == MICRO - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits, labels = model(micro["ids"]), micro["labels"].flatten()
                loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
                loss = loss * ctx.world_size / count
                z_loss = Z * logits.logsumexp(-1).square().mean()
                (loss + self.share(z_loss)).backward()

    def share(self, z_loss):
        return z_loss / MICRO


class Buggy(Clean):
    def share(self, z_loss):
        return z_loss


EXPECT = dict(
    right=[r"z_loss", r"\b3\.0|times 3|3 times|micro.?batch"],
    place=[r"z_loss", r"micro.?batch"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"\bforward (is )?wrong",
        r"\blm\b.*times 3",
    ],
)
WHY = (
    "The mean z-loss of each of three micro-batches is added in full: the term z_loss is three "
    "times too large, the language model's loss is right."
)
