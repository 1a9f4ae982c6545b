"""Data parallelism by hand on three ranks: a bag of three hashed words per example is looked up in a table with sparse gradients (nn.Embedding(sparse=True)), two micro-batches of two examples on each rank; the table's gradient is
summed over the ranks after every micro-batch and added up densely, the other gradients are summed over the ranks at the end.

The bug: the sparse gradient is reduced by an all-reduce of its value tensor, as is done for dense gradients. All ranks have the same number of entries, so that the shapes fit, but entry j belongs to another row of the table on every
rank. Compare pytorch/pytorch PR 19443 (sparse all-reduce for DistributedDataParallel has to gather indices and values) and deepspeedai/DeepSpeed PR 208 (bug fix for sparse grads).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, BAG, WIDTH, HIDDEN, CLASSES = 17, 3, 5, 6, 4
EACH, MICRO = 4, 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(BAG * WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids):
        return self.out(torch.tanh(self.hidden(self.table(ids).flatten(1))))


def reduce_by_rows(grad, group):
    """Sum over the ranks: all indices and values, one behind the other."""
    size = dist.get_world_size(group)
    index, value = grad._indices().contiguous(), grad._values().contiguous()
    indices = [torch.empty_like(index) for _ in range(size)]
    values = [torch.empty_like(value) for _ in range(size)]
    dist.all_gather(indices, index, group=group)
    dist.all_gather(values, value, group=group)
    return torch.sparse_coo_tensor(torch.cat(indices, 1), torch.cat(values), grad.shape)


def reduce_by_slots(grad, group):
    value = grad._values().clone()
    dist.all_reduce(value, group=group)
    return torch.sparse_coo_tensor(grad._indices(), value, grad.shape)


class Clean:
    reduce_sparse = staticmethod(reduce_by_rows)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = 3 * EACH
        return {
            "ids": torch.randint(WORDS, (rows, BAG), generator=g),
            "label": torch.randint(CLASSES, (rows,), generator=g),
            "weight": torch.rand(rows, generator=g) + 0.5,
        }

    def rows_loss(self, model, rows):
        loss = F.cross_entropy(model(rows["ids"]), rows["label"], reduction="none")
        return (loss * rows["weight"]).sum()

    def loss_sum(self, model, rows):
        return self.rows_loss(model, rows), len(rows["label"])

    def distribute(self, model, ctx):
        model.table.sparse = True
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        first, table = ctx.rank * EACH, model.table.weight
        total = torch.zeros_like(table)
        for low in range(first, first + EACH, MICRO):
            rows = {k: v[low : low + MICRO] for k, v in batch.items()}
            (self.rows_loss(model, rows) / len(batch["label"])).backward()
            total += self.reduce_sparse(table.grad, group).to_dense()
            table.grad = None
        table.grad = total
        for p in model.parameters():
            if p is not table:
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    reduce_sparse = staticmethod(reduce_by_slots)


EXPECT = dict(
    right=[
        r"(?i)table",
        r"(?i)reduc|sum|rows?|ind(ex|ices)|sparse|differ|rank",
        r"(?i)reduc|gradient|sum|sparse|ind(ex|ices)|slot|row|place|differ",
    ],
    place=[r"(?i)table"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(hidden|out)\.(weight|bias) (is|are) wrong|(hidden|out) .{0,20}not (all.?)?reduced",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank \d\b|rank \d alone",
        r"(?i)without (a )?grad|detach|recomput",
        r"(?i)(reduced|summed) (twice|again)|counted (twice|again)",
    ],
)
WHY = (
    "Only table.weight is wrong, on all three ranks and differently. Every rank has 6 entries in every micro-batch (2 examples x 3 words); the all-reduce adds entry j of rank 0, 1 and 2, which belong to three different rows "
    "of the table, and each rank puts the sum into the row of its own entry j. So a rank's rows receive the right own contribution plus foreign ones of other words, rows that only other ranks use stay empty, and the ranks "
    "disagree. Forward, backward, local gradient before the reduction, accumulation over the micro-batches, divisor 12 and the dense gradients (hidden, out) are right. Fix: gather indices and values of all ranks and add by "
    "row (reduce_by_rows), or make the gradient dense before the all-reduce."
)
