"""A text classifier (embedding, GRU, linear head) trained with accelerate on four ranks; rank r has the rows r, r + 4, ... of nine (3, 2, 2 and 2). Before the step the ranks agree on one example row to
print, the first row of the main process, with accelerate.utils.broadcast. The loss is the sum over the own rows times the number of ranks over nine, as DDP averages.

The bug: the broadcast gets a view of the own batch. Unlike gather and reduce it works in place, so the first row of ranks 1 to 3 becomes that of rank 0. After accelerate's operations.py
(_gpu_broadcast writes into the tensor it is given) and the class of in-place collectives on a view of training data.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
WORDS, WIDTH, CLASSES, LENGTH, ROWS = 13, 6, 4, 5, 9


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.reader = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        _, last = self.reader(self.words(ids))
        return self.head(last[0])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        return F.cross_entropy(model(rows["ids"]), rows["labels"], reduction="sum"), len(
            rows["labels"]
        )

    def distribute(self, model, ctx):
        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare(model)

    def example(self, mine):
        return broadcast(mine["ids"][:1].clone())

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        own = torch.arange(ctx.rank, ROWS, ctx.world_size)
        mine = {k: v[own] for k, v in batch.items()}
        self.shown = self.example(mine)
        loss, _ = self.loss_sum(model, mine)
        self.accelerator.backward(loss * ctx.world_size / ROWS)


class Buggy(Clean):
    def example(self, mine):
        return broadcast(mine["ids"][:1])


EXPECT = dict(
    right=[
        r"row 0|first row|rank 0|main process|rows? (1|2|3)\b|ranks? (1|2|3)\b|broadcast|overwrit",
        r"rows?|ids|data|input|batch|example",
    ],
    place=[r"\brows?\b", r"\bids\b", r"broadcast", r"words"],
    wrong=[
        r"not (been )?(all.?)?reduced|reduced (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"backward formula|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"rank 0.{0,20} (reads|takes|trains on) .{0,15}(wrong|other|foreign) rows|all ranks (read|take|train on) the same rows",
    ],
)
WHY = (
    "example() gives accelerate's broadcast the view mine['ids'][:1], which is written in place: on ranks 1, 2 and 3 the ids of the first own row (rows 1, 2 and 3 of the batch) become those of row 0. Their "
    "labels stay those of rows 1, 2, 3, so row 0's ids are scored four times, once with its own label and three times with another row's; the ids of rows 1, 2 and 3 are not used at all. Rank 0 and the rows "
    "4 to 8 are right. All gradients are wrong on all ranks after DDP's average. The weights, the factor world_size / 9 and the reduction are right. Fix: broadcast a clone."
)
