"""Recommender on three ranks with own data parallelism: a table of items with sparse gradients (nn.Embedding, sparse=True) and a dense user tower; a row is a user with three items (bought or not), binary cross entropy summed over items /
items of all ranks. Two micro-batches per rank, gradients accumulate, then everything is summed over the ranks.

The bug: for the table the all-reduce is applied to the values of the sparse gradient only. Every rank has the same number of values (rows x 3, not coalesced), so the shapes agree, but the indices are each rank's own: the sums of
unrelated items' gradients are booked under the rank's own items. As in horovod/horovod issue 679 (one cannot all-reduce a sparse tensor, it has keys and values), pytorch/pytorch issue 31413 (allreduce for sparse tensors is not working).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ITEMS, FEATURES, WIDTH, SLOTS, ROWS = 10, 5, 4, 3, 12
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 8)], [(8, 9), (9, 12)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.user = nn.Sequential(nn.Linear(FEATURES, 7), nn.SiLU(), nn.Linear(7, WIDTH))

    def forward(self, user, item):
        return (self.items(item) * self.user(user)[:, None]).sum(-1)


def click_loss(model, rows):
    scores = model(rows["user"], rows["item"])
    return F.binary_cross_entropy_with_logits(
        scores, rows["bought"].to(scores.dtype), reduction="sum"
    )


class Clean:
    values_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randn(ROWS, FEATURES, generator=g),
            "item": torch.randint(ITEMS, (ROWS, SLOTS), generator=g),
            "bought": torch.randint(2, (ROWS, SLOTS), generator=g),
        }

    def loss_sum(self, model, rows):
        return click_loss(model, rows), rows["item"].numel()

    def distribute(self, model, ctx):
        model.items.sparse = True
        return model

    def reduce(self, p, group):
        if not p.grad.is_sparse:
            dist.all_reduce(p.grad, group=group)
            return
        if self.values_only:
            dist.all_reduce(p.grad._values(), group=group)
            p.grad = p.grad.to_dense()
        else:
            p.grad = p.grad.to_dense()
            dist.all_reduce(p.grad, group=group)

    def step(self, model, batch, ctx):
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (click_loss(model, rows) / (ROWS * SLOTS)).backward()
        for p in model.parameters():
            self.reduce(p, ctx.group("dp"))


class Buggy(Clean):
    values_only = True


EXPECT = dict(
    right=[
        r"(?i)items?|table|embedding|sparse",
        r"(?i)reduc|summed|\bsum\b|collective|exchange|transport|synchroni|after the backward",
        r"(?i)wrong|differ|other|own|mix|not the|foreign|index|indices|permut|order|unequal|place",
    ],
    place=[r"(?i)items(\.weight)?|\btable\b|embedding|sparse"],
    wrong=[
        r"(?i)user\S*(weight|bias)? (is|are) wrong",
        r"(?i)(never|not) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|averag",
        r"(?i)forward (is|goes|was) wrong|goes wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)(only|just) (on )?rank [012]\b|rank [012] alone",
        r"(?i)own (backward|gradient) .{0,20}wrong|backward of the embedding",
    ],
)
WHY = (
    "Forward, loss and each rank's own gradient of items are right. In the reduction the k-th value (4 numbers) of every rank is summed, k = 0 .. 11, but entry k belongs to another item on each rank; each rank keeps its own indices. "
    "So the table's gradient differs from rank to rank and is wrong on all three: the row of an item contains gradients of other items from the other ranks, items that a rank did not read have zero there although others read them; "
    "items read several times by a rank get all the sums of their slots. The column sums over all items are right on every rank (sum of all values). user (dense) is right. Divisor 36 and accumulation of the micro-batches are right. "
    "Fix: to_dense() before the all-reduce, or gather indices and values."
)
