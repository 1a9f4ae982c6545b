"""DDP with no_sync, three micro-batches, a fixed loss scale that is taken out after the reduction, for parameter groups as the optimizer has them; the
output head is tied to the embedding. After reports on tied weights that occur in two parameter groups: a tied weight is unscaled
twice.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, MICRO, SCALE = 10, 7, 26, 11, 3, 64.0


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.rnn = nn.LSTM(WIDTH, 13, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(13), nn.Linear(13, 20), nn.GELU(), nn.Linear(20, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCAB)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.mlp(self.rnn(self.embed(ids))[0]))


def token_loss(model, rows):
    logits = model(rows["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, rows["labels"].flatten(), ignore_index=-100, reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=g)
        lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=g)
        return {
            "ids": ids[:, :-1],
            "labels": ids[:, 1:].where(torch.arange(LENGTH) < lengths, -100),
        }

    def loss_sum(self, model, rows):
        return token_loss(model, rows), (rows["labels"] >= 0).sum()

    def distribute(self, model, ctx):
        return DDP(model, process_group=ctx.group("dp"))

    def groups(self, model):
        """Embeddings, body and head, as the optimizer has them for their learning rates."""
        tied = model.head.weight
        return [
            list(model.embed.parameters()),
            [*model.rnn.parameters(), *model.mlp.parameters()],
            [p for p in model.head.parameters() if p is not tied],
        ]

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        count = (batch["labels"] >= 0).sum()
        parts = torch.arange(ROWS).tensor_split(n)[me].tensor_split(MICRO)
        for m, at in enumerate(parts):
            with nullcontext() if m == MICRO - 1 else model.no_sync():
                loss = token_loss(model, {k: v[at] for k, v in batch.items()})
                (loss / count * n * SCALE).backward()
        for group in self.groups(model.module):
            for p in group:
                p.grad.div_(SCALE)


class Buggy(Clean):
    def groups(self, model):
        body = [*model.rnn.parameters(), *model.mlp.parameters()]
        return [list(model.embed.parameters()), body, list(model.head.parameters())]


EXPECT = dict(
    right=[r"embed\.weight|head\.weight|tied", r"1/64|64|0\.0156|factor"],
    place=[r"embed\.weight|head\.weight|tied"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(rnn|mlp|head\.bias)\S* (is|are|has|have) .{0,20}(wrong|factor|64)",
        r"forward .{0,40}(goes|is) wrong in|gradient that reaches \S* is wrong",
        r"(own|local) (count|denominator|divisor)|mean of (the )?means",
        r"(head|embed)\S* (use|path) .{0,20}(missing|lost)|one of (its|the) (two )?uses",
    ],
)
WHY = (
    "The tied weight is in the group of the embedding and in that of the head, so its gradient is divided by the loss scale twice: embed.weight (= head.weight) "
    "has 1/64 of its gradient on all ranks, both of its uses alike. All other parameters are right. The mistake is after the reduction; "
    "forward, backward, no_sync and DDP's average are right."
)
