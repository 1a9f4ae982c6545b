"""Masked prediction of cluster ids from speech frames (HuBERT), masks drawn from a seed per utterance. After fairseq's mask seeds (seed,
epoch, index of the sample) and FAULTS C16 (one random stream on all data ranks, transformers issue 31412): the index is the place in
the rank's batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"speech": {"axes": {"dp": 3}}}}
ROWS, FRAMES, BANDS, WIDTH, CLUSTERS = 11, 12, 4, 8, 6


class Hubert(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.mask_vector = nn.Parameter(0.5 * torch.randn(WIDTH))
        self.context = nn.GRU(WIDTH, 5, batch_first=True, bidirectional=True)
        self.project = nn.Linear(10, WIDTH)
        self.codes = nn.Parameter(torch.randn(CLUSTERS, WIDTH))

    def forward(self, x, hidden):
        x = F.gelu(self.front(x).mT)
        x = torch.where(hidden[..., None], self.mask_vector, x)
        x = F.normalize(self.project(self.context(x)[0]), dim=-1)
        return x @ F.normalize(self.codes, dim=-1).mT / 0.2


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Hubert()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.randint(6, FRAMES + 1, (ROWS, 1), generator=g)
        return {
            "id": torch.arange(ROWS),
            "x": torch.randn(ROWS, BANDS, FRAMES, generator=g),
            "clusters": torch.randint(CLUSTERS, (ROWS, FRAMES), generator=g),
            "valid": torch.arange(FRAMES) < lengths,
        }

    def spans(self, ids, valid):
        hidden = torch.zeros_like(valid)
        for row, i in zip(hidden, ids.tolist()):
            g = torch.Generator().manual_seed(1000 * (self.seed + 1) + i)
            for start in torch.randint(FRAMES - 2, (2,), generator=g).tolist():
                row[start : start + 2] = True
        return hidden & valid

    @staticmethod
    def frame_loss(model, rows, hidden):
        logits = model(rows["x"], hidden)
        loss = F.cross_entropy(logits.mT, rows["clusters"], reduction="none")
        return (loss * hidden).sum()

    def loss_sum(self, model, rows):
        hidden = self.spans(rows["id"], rows["valid"])
        return self.frame_loss(model, rows, hidden), hidden.sum()

    def seeds(self, rows):
        return rows["id"]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        hidden = self.spans(self.seeds(mine), mine["valid"])
        count = hidden.sum()
        dist.all_reduce(count)
        (self.frame_loss(model, mine, hidden) / count).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def seeds(self, rows):
        return torch.arange(len(rows["id"]))


EXPECT = dict(
    right=[
        r"mask|hidden|input|forward|output|context|rows?|data|random|seed",
        r"ranks? \W?[12]|rank|mask|hidden|same|rows? \W?\d|context|forward",
    ],
    place=[r"ranks? \W?[12]", r"context|mask|hidden|front", r"rows?"],
    wrong=[
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"reduced (twice|again)|counted (twice|\d times)",
        r"(output|forward) of (the )?front\S* (is|was) wrong|first wrong .{0,20}front",
        r"mean of (the )?(rank |ranks' )?means",
        r"(forward|output|input) .{0,30}wrong on ranks? \W?0\b",
        r"detach|no_grad",
    ],
)
WHY = (
    "The masks of ranks 1 and 2 are drawn from the seeds 0, 1, 2, ... of rank 0's utterances instead of their own, so their masked "
    "frames, from the input of context on, and the count of masked frames are others than they should be. Rank 0's masks are right; "
    "all gradients are wrong."
)
