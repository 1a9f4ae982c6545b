"""Watch prediction under DDP on three ranks, two or three micro-batches each of uneven size (no_sync before the last). A row has a bag of tags of any length (none is allowed) and a few dense features. A rank lays the tags of all its rows
out once, one flat list and the bounds of the bags, and every micro-batch takes its window of the list for nn.EmbeddingBag (mode mean). The divisor is the number of rows of all ranks.

The bug: the window of the flat list has a beginning and no end. Without include_last_offset the last bag goes up to the end of the list, so the last row of a micro-batch takes in all tags of the rank's later rows. After the reports on what
closes the last bag: pytorch/pytorch issue 52851 (embedding_bag with include_last_offset should error if offsets[-1] != input.size()).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TAGS, WIDTH, DENSE, MOST = 11, 5, 3, 4
LENGTHS = [2, 1, 3, 0, 2, 4, 1, 2, 3, 1, 2, 1, 3]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 8), (8, 9)], [(9, 10), (10, 13)]]
ROWS = len(LENGTHS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tags = nn.EmbeddingBag(TAGS, WIDTH, mode="mean")
        self.dense = nn.Linear(DENSE, WIDTH)
        self.hidden, self.score = nn.Linear(2 * WIDTH, 7), nn.Linear(7, 1)

    def forward(self, values, offsets, dense):
        bags = self.tags(values, offsets)
        both = torch.cat([bags, torch.tanh(self.dense(dense))], 1)
        return self.score(F.silu(self.hidden(both))).squeeze(1)


def flat(tags, lengths):
    """All tags in one list, and where each bag begins; one bound more than rows."""
    values = tags[torch.arange(MOST) < lengths[:, None]]
    return values, F.pad(lengths.cumsum(0), (1, 0))


def watch_loss(scores, watched):
    return F.binary_cross_entropy_with_logits(scores, watched.to(scores.dtype), reduction="sum")


class Clean:
    closed = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "tags": torch.randint(TAGS, (ROWS, MOST), generator=g),
            "lengths": torch.tensor(LENGTHS),
            "dense": torch.randn(ROWS, DENSE, generator=g),
            "watched": torch.randint(2, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        values, bounds = flat(rows["tags"], rows["lengths"])
        scores = model(values, bounds[:-1], rows["dense"])
        return watch_loss(scores, rows["watched"]), len(scores)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def window(self, values, bounds, low, high):
        first = int(bounds[low])
        last = int(bounds[high]) if self.closed else len(values)
        return values[first:last], bounds[low:high] - first

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        start, stop = parts[0][0], parts[-1][1]
        values, bounds = flat(batch["tags"][start:stop], batch["lengths"][start:stop])
        for turn, (low, high) in enumerate(parts):
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                some, offsets = self.window(values, bounds, low - start, high - start)
                scores = model(some, offsets, batch["dense"][low:high])
                (watch_loss(scores, batch["watched"][low:high]) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    closed = False


EXPECT = dict(
    right=[
        r"(?i)tags|bag|embedding",
        r"(?i)forward|input|\bids?\b|values|offset|window|tags of|bag|reads|other rows|later rows",
        r"(?i)micro.?batch|rows? (1|2|7|9)\b|last row",
    ],
    place=[r"(?i)\btags\b|bag|embedding"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)all micro.?batch(es)? (is|are|go(es)?) wrong|the last micro.?batch (of each rank )?(is|goes) wrong",
        r"(?i)\bdense(\.\w+)? (goes|is) wrong in the forward|labels? .{0,20}(is|are) (wrong|of)|recomput",
        r"(?i)wrong backward|backward of \S+ (is|goes) wrong",
    ],
)
WHY = (
    "window() does not cut the flat list of tags at bounds[high], so in nn.EmbeddingBag the last bag of a micro-batch goes on to the end of the rank's list: the last row of every micro-batch but the rank's last takes in the tags of all later "
    "rows of the rank. Wrong: rank 0 micro-batch 0 (row 1) and 1 (row 2), rank 1 micro-batch 0 (row 7), rank 2 micro-batch 0 (row 9); the other rows, and the last micro-batch of every rank, are right. The forward goes wrong at `tags` (its "
    "input values are too many); the wrong score then makes the gradients of all parameters wrong. Divisor 13, no_sync, labels, dense features and reduction are right. Fix: values[first:bounds[high]] (or include_last_offset with the bounds)."
)
