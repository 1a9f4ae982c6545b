"""Data parallel on three ranks (rows 5, 4 and 4), micro-batches of at most four rows. A recurrent encoder carries two accelerate hooks: one sorts the rows by length, one deals them out to two halves that are
encoded one after the other (and each within its own longest length). After the encoder both put the rows back. Gradients are summed over the ranks; the divisor is the number of rows of the full batch.

The bug: the hooks are joined by accelerate's SequentialHook, that calls post_forward in the same order as pre_forward; the rows are unsorted before they are undealt. After accelerate's hooks
(add_hook_to_module(append=True)), and huggingface/accelerate reports on the order of chained hooks.
"""

import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
LENGTHS = [3, 6, 2, 5, 4, 6, 1, 4, 3, 2, 6, 3, 5]
WORDS, WIDTH, CLASSES, LENGTH, AT_ONCE = 11, 6, 4, 6, 4


class Reorder(ModelHook):
    """Puts the rows into another order before the module and back after it."""

    def order(self, lengths):
        raise NotImplementedError

    def pre_forward(self, module, x, lengths):
        order = self.order(lengths)
        self.back = order.argsort()
        return (x[order], lengths[order]), {}

    def post_forward(self, module, output):
        return output[self.back]


class SortByLength(Reorder):
    def order(self, lengths):
        return lengths.argsort(descending=True, stable=True)


class DealOut(Reorder):
    def order(self, lengths):
        numbers = torch.arange(len(lengths))
        return torch.cat([numbers[0::2], numbers[1::2]])


class InAndOut(SequentialHook):
    """The last hook on the way in is the first on the way out."""

    def post_forward(self, module, output):
        for hook in reversed(self.hooks):
            output = hook.post_forward(module, output)
        return output


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids, lengths):
        out = []
        middle = (len(ids) + 1) // 2
        for part, n in ((ids[:middle], lengths[:middle]), (ids[middle:], lengths[middle:])):
            if len(part):
                states, _ = self.gru(self.words(part[:, : int(n.max())]))
                out.append(states[torch.arange(len(part)), n - 1])
        return torch.cat(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.classes = nn.Sequential(
            nn.Linear(WIDTH + 2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
        )

    def forward(self, rows):
        told = self.encoder(rows["ids"], rows["lengths"])
        scores = self.classes(torch.cat([told, rows["extra"].to(told.dtype)], -1))
        return F.cross_entropy(scores, rows["labels"], reduction="sum")


class Clean:
    joined = InAndOut

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(WORDS, (len(LENGTHS), LENGTH), generator=g),
            "lengths": torch.tensor(LENGTHS),
            "extra": torch.randn(len(LENGTHS), 2, generator=g),
            "labels": torch.randint(CLASSES, (len(LENGTHS),), generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows), len(rows["labels"])

    def distribute(self, model, ctx):
        add_hook_to_module(model.encoder, self.joined(SortByLength(), DealOut()))
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for part in zip(*(v.split(AT_ONCE) for v in mine.values())):
            (model(dict(zip(mine, part))) / len(LENGTHS)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    joined = SequentialHook


EXPECT = dict(
    right=[
        r"encoder|classes|told|hook|forward|output",
        r"rows?|order|permut|exchanged|swapped|belongs? to|other (row|place|value|input)|index|differ",
    ],
    place=[r"encoder|classes|told|hook"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"micro.?batch(es)? .{0,20}(lost|dropped|never read)|rows? .{0,20}(lost|dropped|read twice)",
        r"gru .{0,30}(formula|weights?) .{0,15}wrong|backward formula",
    ],
)
WHY = (
    "On the way in the rows are sorted (s), then dealt out (d): row s[d[i]] lies at place i. Right on the way out: undo d, then s. SequentialHook.post_forward undoes s first and then d, so the encoder's "
    "outputs lie in another order than extra and labels when they reach `classes`. Rank 0's first micro-batch (rows 0 to 3) is given the outputs of rows 3, 2, 1, 0; its second has one row and is right. "
    "Rank 1 (rows 5 to 8) is given those of rows 5, 8, 6, 7, rank 2 (rows 9 to 12) those of 9, 12, 10, 11: their first rows (5 and 9) are right. Inside the encoder ids, lengths and states are right. Sums "
    "over the ranks, divisor 13 and split are right. All gradients are wrong on all ranks. Fix: post_forward in reversed order of the hooks."
)
