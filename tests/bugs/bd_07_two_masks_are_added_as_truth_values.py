"""A small language model under DDP on four ranks (uneven micro-batches, no_sync before the last). A token is trained if it belongs to the answer, and once more if it is a key word: its weight is the sum of two masks, 0, 1 or 2. The divisor is
the sum of all weights of the batch, counted mask by mask.

The bug: the two masks are boolean tensors and are added with +, which for booleans is the logical or. Key words inside the answer get weight 1 for 2. The divisor is right, since each mask is summed by itself. Adding boolean tensors as a trap: pytorch/pytorch (arithmetic of torch.bool
since 1.2, the plus of two masks).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
VOCABULARY, TOKENS, WIDTH, ROWS = 11, 7, 6, 14
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 8)], [(8, 11)], [(11, 12), (12, 14)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.reader = nn.GRU(WIDTH, 9, batch_first=True)
        self.head = nn.Linear(9, VOCABULARY)

    def forward(self, ids):
        return self.head(self.reader(self.words(ids))[0])


def weighted_loss(model, rows, weight):
    logits = model(rows["ids"])[:, :-1]
    loss = F.cross_entropy(logits.transpose(1, 2), rows["ids"][:, 1:], reduction="none")
    return (loss * weight[:, 1:]).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        begin = torch.randint(1, TOKENS - 2, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "answer": torch.arange(TOKENS) >= begin,
            "keyword": torch.rand(ROWS, TOKENS, generator=g) < 0.35,
        }

    def count(self, rows):
        return int(rows["answer"][:, 1:].sum() + rows["keyword"][:, 1:].sum())

    def loss_sum(self, model, rows):
        weight = rows["answer"].long() + rows["keyword"].long()
        return weighted_loss(model, rows, weight), self.count(rows)

    def weight(self, rows):
        return torch.stack([rows["answer"], rows["keyword"]]).sum(0)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts, total = PARTS[ctx.rank], self.count(batch)
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = weighted_loss(model, rows, self.weight(rows))
                (loss * ctx.world_size / total).backward()


class Buggy(Clean):
    def weight(self, rows):
        return rows["answer"] + rows["keyword"]


EXPECT = dict(
    right=[
        r"(?i)weight|mask|token|keyword|answer|coefficient|loss|position",
        r"(?i)weight|mask|coefficient|half|1/2|0\.5|one instead of two|too (small|little|low)|bool|\bor\b|less|not like|factor",
        r"(?i)loss|token|keyword|answer|label|mask|after the (model|head|logits)|position|element",
    ],
    place=[r"(?i)loss|weight|mask|token|keyword|answer"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|divisor (of|on) (the )?(rank|micro)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left",
        r"(?i)only (on )?rank [0-3]\b|rank [0-3] alone",
        r"(?i)(reader|words|head|GRU)('s)? (forward|backward) (is|goes) wrong|the model goes wrong|recomput|dropout|detach",
        r"(?i)labels? .{0,20}(is|are) (wrong|shifted)|tokens? .{0,20}(dropped|left out|not trained)",
    ],
)
WHY = (
    "The weight of a token must be answer + keyword as numbers (0, 1, 2). Buggy.weight adds two boolean tensors, which gives the logical or, so tokens that are in both masks (key words inside the answer) are trained with weight 1 for 2: half "
    "their loss is missing. All others are right. It happens on all ranks, in all micro-batches, in the rows with such tokens. The divisor (sum of both masks over the full batch) is right, so are the model, the logits, the labels, no_sync and DDP. All gradients are "
    "wrong, with a contribution of the doubly marked tokens that is too small by half. Fix: add the masks as integers (torch.stack(...).sum(0) or .long())."
)
