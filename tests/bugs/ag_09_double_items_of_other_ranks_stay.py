"""Two-tower retrieval with in-batch negatives under DDP on three ranks with accumulation: each user row is scored against the bought items of ALL rows (item ids are gathered over the ranks, the item tower is replicated and reads the
gathered ids). The same item may have been bought in several rows; such columns are no negatives for each other (accidental hits) and are masked out of the softmax.

The bug: the accidental hits are looked for among the rank's own items only, at the columns of the own rows; equal items that came from other ranks stay in the denominator as negatives. After tensorflow/recommenders issues 334, 631
and 706 (remove_accidental_hits), NVIDIA-Merlin/models issue 92, huggingface/sentence-transformers issue 3189.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ITEM = [3, 5, 3, 8, 5, 9, 3, 8, 2, 9, 2]
FEATURES, ITEMS, WIDTH = 5, 10, 6
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)], [(7, 9), (9, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.table = nn.Embedding(ITEMS, WIDTH)
        self.item = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))

    def forward(self, user, pool):
        return self.user(user) @ self.item(self.table(pool)).T


def retrieval_loss(model, rows, pool, hits):
    """hits[i, j]: column j holds the item of row i again (and is not its own column)."""
    scores = model(rows["user"], pool).masked_fill(hits, float("-inf"))
    return F.cross_entropy(scores, rows["column"], reduction="sum")


class Clean:
    own_only = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(ITEM)
        return {
            "user": torch.randn(rows, FEATURES, generator=g),
            "column": torch.arange(rows),
            "pool": torch.tensor(ITEM).expand(rows, rows).clone(),
        }

    def loss_sum(self, model, rows):
        pool, column = rows["pool"][0], rows["column"]
        hits = pool[None] == pool[column][:, None]
        hits[torch.arange(len(column)), column] = False
        return retrieval_loss(model, rows, pool, hits), len(column)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        start, stop = parts[0][0], parts[-1][1]
        own = batch["pool"][0, start:stop]
        gathered = [None] * ctx.world_size
        dist.all_gather_object(gathered, own.tolist(), group=ctx.group("dp"))
        pool = torch.tensor([item for items in gathered for item in items])
        hits = torch.zeros(len(own), len(pool), dtype=torch.bool)
        if self.own_only:
            hits[:, start:stop] = own[:, None] == own[None]
        else:
            hits[:] = own[:, None] == pool[None]
        hits[torch.arange(len(own)), torch.arange(start, stop)] = False
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            part = hits[low - start : high - start]
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = retrieval_loss(model, rows, pool, part)
                (loss * ctx.world_size / len(ITEM)).backward()


class Buggy(Clean):
    own_only = True


EXPECT = dict(
    right=[
        r"(?i)loss|softmax|logits?|scores?|negative|mask|denominator|columns?|candidate",
        r"(?i)(other|wrong|differ|not (masked|left out|the (own|right))|mask|stay|too many|more|denominator|in the loss|loss (itself|function|code)|own (rows|items|rank))",
        r"(?i)rank|rows?|item|micro.?batch|loss",
    ],
    place=[r"(?i)loss|softmax|logits?|scores?|mask|negative|candidate|columns?"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)(user|item|table)[^.]{0,30}(forward|output) (is|goes) wrong|goes wrong in the (forward|backward) of (user|item|table)",
        r"(?i)gather.{0,30}(without (a )?grad|no grad|adjoint)|negatives? of other ranks.{0,30}(missing|no gradient)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank [012]\b|column.{0,20}(labels?|numbers?) (is|are) wrong",
    ],
)
WHY = (
    "The towers' outputs and all scores are right on all ranks; the mask before the softmax lacks the equal items of other ranks. Item 3 (rows 0, 2 on rank 0; row 6 on rank 1): rows 0 and 2 keep column 6, row 6 keeps columns 0 and "
    "2. Item 5 (row 1 on rank 0, row 4 on rank 1), item 8 (row 3 on rank 0, row 7 on rank 2), item 9 (row 5 on rank 1, row 9 on rank 2): each keeps the other's column. Rows 8 and 10 (item 2, both on rank 2) and the pair 0-2 are "
    "masked rightly. So the loss is too large in rows 0-7 and 9, right in rows 8 and 10, and the gradients of user, table and item are wrong in direction, equally on all ranks after the average. Own columns, gathered ids, divisor "
    "11, no_sync, reduction are right. Fix: compare own items with all gathered items."
)
