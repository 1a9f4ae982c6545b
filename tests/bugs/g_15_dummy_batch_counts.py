"""fairseq-like accumulation: two micro-batches per rank and update, five for three ranks; the rank that runs out repeats its first one as
a dummy with zero loss, so that all ranks take part in the collectives. After fairseq's Trainer (`is_dummy_batch`, loss and sample_size
times zero) and FAULTS C03-08 (uneven inputs): the sample size of the dummy is counted.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
BATCHES, PER_BATCH, LENGTH, WORDS, WIDTH, PAD = 5, 3, 7, 22, 7, 1


class Denoiser(nn.Module):
    """Words from their damaged neighbours."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PAD)
        self.gru = nn.GRU(WIDTH, 6, batch_first=True, bidirectional=True)
        self.norm, self.out = nn.LayerNorm(12), nn.Linear(12, WORDS)

    def forward(self, ids):
        return self.out(self.norm(self.gru(self.words(ids))[0]))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = BATCHES * PER_BATCH
        lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=g)
        target = torch.randint(2, WORDS, (rows, LENGTH), generator=g)
        target = target.masked_fill(torch.arange(LENGTH) >= lengths, PAD)
        damaged = torch.rand(rows, LENGTH, generator=g) < 0.3
        return {"source": target.masked_fill(damaged & (target != PAD), 0), "target": target}

    def loss_sum(self, model, rows):
        logits, target = model(rows["source"]), rows["target"]
        loss = F.cross_entropy(logits.mT, target, ignore_index=PAD, reduction="sum")
        return loss, (target != PAD).sum()

    def train_step(self, model, sample, ignore_grad):
        loss, sample_size = self.loss_sum(model, sample)
        if ignore_grad:
            loss, sample_size = loss * 0, sample_size * 0
        loss.backward()
        return sample_size

    def step(self, model, batch, ctx):
        batches = [{k: v.split(PER_BATCH)[i] for k, v in batch.items()} for i in range(BATCHES)]
        mine, total = batches[ctx.rank :: ctx.world_size], 0
        for i in range(-(-BATCHES // ctx.world_size)):
            dummy = i >= len(mine)
            total = total + self.train_step(model, mine[0] if dummy else mine[i], dummy)
        dist.all_reduce(total)
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= total


class Buggy(Clean):
    def train_step(self, model, sample, ignore_grad):
        loss, sample_size = self.loss_sum(model, sample)
        if ignore_grad:
            loss = loss * 0
        loss.backward()
        return sample_size


EXPECT = dict(
    right=[
        r"factor|scal\w*|divi\w+|normali[sz]\w*|count\w*|too small|tokens|0\.[78]\d*|\d+/\d+",
        r"all|every|each|one factor|loss|total|tokens|count|everything",
    ],
    place=[
        r"(all|every|each) (ranks?|param)",
        r"everything",
        r"loss",
        r"ranks? \W?2|all of them|ranks",
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?(reduced|summed)",
        r"(reduced|summed) (twice|again)",
        r"mean of (the )?(rank |ranks' )?means",
        r"forward (pass )?(is|was) (wrong|different)",
        r"rows? .{0,20}(counted twice|missing|dropped|lost)",
        r"micro-?batch(es)? (is|are|was|were) (lost|missing|dropped)",
        r"only (the )?(gru|words|out|norm)\S* (is|are) wrong",
    ],
)
WHY = (
    "Rank 2 has one micro-batch and repeats it as a dummy with loss zero, but the tokens of its rows 6 to 8 are counted again, so all "
    "gradients are divided by N + n (n: the tokens of that micro-batch) instead of N: one factor N / (N + n) on all parameters and "
    "ranks. Sums of rows and forward are right."
)
