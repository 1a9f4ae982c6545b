"""A word model with an adaptive softmax (a head of frequent words and two clusters of rarer ones) under DDP on two ranks, three micro-batches each (no_sync before the last). Every token has a weight (0 for padding, 1 to 3 by the quality
of its text), the loss is the weighted sum of the token losses, divided by the weights of all ranks.

The bug: the adaptive softmax works cluster by cluster and puts the losses one after the other as they come (first all tokens of the head, then cluster 1, then cluster 2) instead of back to the tokens' places; the weights are still in the
order of the tokens. After keep_order of ProjectedAdaptiveLogSoftmax in kimiyoung/transformer-xl and transformers (TransfoXL), off by default.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CUTS, WIDTH, TOKENS, ROWS = [0, 4, 8, 13], 8, 6, 10
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 9), (9, 10)]]


class ClusterSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.clusters = len(CUTS) - 2
        self.head = nn.Linear(WIDTH, CUTS[1] + self.clusters)
        self.tails = nn.ModuleList(
            nn.Linear(WIDTH, high - low) for low, high in zip(CUTS[1:-1], CUTS[2:])
        )
        self.keep_order = True

    def forward(self, hidden, target):
        """The loss of every token: hidden (tokens, width), target (tokens)."""
        head = F.log_softmax(self.head(hidden), 1)
        places, losses = [], []
        for number, (low, high) in enumerate(zip(CUTS[:-1], CUTS[1:])):
            where = ((target >= low) & (target < high)).nonzero().squeeze(1)
            word = (target[where] - low)[:, None]
            if number == 0:
                found = head[where].gather(1, word)
            else:
                tail = F.log_softmax(self.tails[number - 1](hidden[where]), 1)
                found = tail.gather(1, word) + head[where, CUTS[1] + number - 1, None]
            places.append(where)
            losses.append(-found.squeeze(1))
        out = torch.cat(losses)
        if self.keep_order:
            out = torch.zeros_like(out).index_copy(0, torch.cat(places), out)
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(CUTS[-1], WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.mix = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = ClusterSoftmax()

    def forward(self, ids):
        hidden, _ = self.mix(self.words(ids[:, :-1]) + self.places)
        return self.out(hidden.flatten(0, 1), ids[:, 1:].flatten())


class Clean:
    keep_order = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(3, TOKENS + 1, (ROWS, 1), generator=g)
        quality = torch.randint(1, 4, (ROWS, 1), generator=g)
        return {
            "ids": torch.randint(CUTS[-1], (ROWS, TOKENS + 1), generator=g),
            "weight": quality * (torch.arange(TOKENS) < lengths),
        }

    def loss_sum(self, model, rows):
        losses = model(rows["ids"])
        return (losses * rows["weight"].flatten()).sum(), int(rows["weight"].sum())

    def distribute(self, model, ctx):
        model.out.keep_order = self.keep_order
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        total = int(batch["weight"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / total).backward()


class Buggy(Clean):
    keep_order = False


EXPECT = dict(
    right=[
        r"(?i)order|permut|place|position|weight|align|index|cluster|shuffl|out\b|ClusterSoftmax|mask",
        r"(?i)loss|forward|value|weight|token|rows|output",
        r"(?i)order|permut|other (token|position|row|weight|place)s?|align|misplac|mismatch|wrong (token|position|row|weight|place)s?|forward|weights? of|differ|scal|coefficient",
    ],
    place=[r"(?i)\bout\b|ClusterSoftmax|keep_order|cluster|head|tails|weight|loss"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)mean of means|wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|stale|left over",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)backward of ClusterSoftmax (is|goes) wrong|custom backward|embedding (is|goes) wrong",
        r"(?i)mix(\.\w+)? (goes|is) wrong in the forward",
    ],
)
WHY = (
    "ClusterSoftmax.forward returns in Buggy (keep_order False) the token losses in the order of the clusters (within a cluster by token) instead of the order of the tokens; the caller multiplies them by rows['weight'].flatten(), which is in "
    "the order of the tokens. So token losses meet the weights of other tokens: padding is counted, tokens of texts get the weight of other texts of the same micro-batch. All ranks, all micro-batches that have unequal weights and more than one "
    "cluster in mixed order; each token's loss as such is right, the forward goes wrong at the output of `out`. All parameters' gradients are wrong. Divisor, no_sync, DDP are right. Fix: put the losses back with index_copy (keep_order = True)."
)
