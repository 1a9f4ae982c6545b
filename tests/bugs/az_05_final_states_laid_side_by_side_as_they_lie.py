"""A sentence classifier with a bidirectional GRU under DDP on three ranks: the two directions' final states are put side by side and classified; the auxiliary tag of every word is read from the outputs. Three, four and two micro-batches
of one to three sentences, no_sync before the last, a common divisor.

The bug: the final state of a GRU is (directions, rows, width), also with batch_first, and it is brought to (rows, 2 * width) by view alone: the values of neighbouring rows and of the same direction come side by side. As in
graykode/nlp-tutorial issue 38 (Question about tensor.view operation in Bi-LSTM) and timbmg/Sentence-VAE issue 15.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, WIDTH, CLASSES, TAGS = 5, 11, 5, 4, 3
PARTS = [[(0, 1), (1, 3), (3, 6)], [(6, 7), (7, 8), (8, 9), (9, 10)], [(10, 13), (13, 15)]]
ROWS = 15


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.encoder = nn.GRU(6, WIDTH, batch_first=True, bidirectional=True)
        self.squeeze, self.classify = nn.Linear(2 * WIDTH, 6), nn.Linear(6, CLASSES)
        self.tag = nn.Linear(2 * WIDTH, TAGS)
        self.turned = True

    def forward(self, ids):
        outputs, last = self.encoder(self.embed(ids))
        if self.turned:
            state = last.transpose(0, 1).reshape(len(ids), -1)
        else:
            state = last.contiguous().view(len(ids), -1)
        return self.classify(torch.tanh(self.squeeze(state))), self.tag(outputs)


def sentence_loss(model, rows):
    kind, tags = model(rows["ids"])
    loss = F.cross_entropy(kind, rows["kind"], reduction="sum")
    return loss + F.cross_entropy(tags.flatten(0, 1), rows["tags"].flatten(), reduction="sum")


class Clean:
    turned = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, TOKENS), generator=g),
            "kind": torch.randint(CLASSES, (ROWS,), generator=g),
            "tags": torch.randint(TAGS, (ROWS, TOKENS), generator=g),
        }

    def loss_sum(self, model, rows):
        return sentence_loss(model, rows), len(rows["kind"])

    def distribute(self, model, ctx):
        model.turned = self.turned
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (sentence_loss(model, rows) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    turned = False


EXPECT = dict(
    right=[
        r"(?i)squeeze|state|encoder|between|view|reshape|layout",
        r"(?i)forward|input|values?|activation|permut|mix|order|layout|other rows|rows",
        r"(?i)squeeze|final state|last state|view|layout|reshape|transpos|permut|other rows|mixed",
    ],
    place=[r"(?i)squeeze|encoder|state"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|"
        r"no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)rank 1.{0,25}(goes|is) wrong|all (three )?ranks.{0,25}(goes|go|is|are) wrong",
        r"(?i)\btag\b.{0,25}(forward|output).{0,20}wrong|(encoder|embed).{0,20}forward.{0,20}wrong",
    ],
)
WHY = (
    "The encoder's outputs and final states are right; the tensor that enters `squeeze` is not. In micro-batches of two or three rows, row r of it holds the states 2r and 2r+1 of the list (forward direction of all rows, then backward "
    "direction of all rows), not both directions of its own sentence. With one row the view is right: rank 0's micro-batch 0 (row 0) and all micro-batches of rank 1 (rows 6-9) are right; wrong are rank 0's micro-batches 1 and 2 (rows "
    "1-5) and rank 2's both (rows 10-14). The forward goes wrong at the input of `squeeze`; wrong gradients for squeeze, classify, and through mixed-up states for encoder and embed. tag reads the outputs and its gradient is right. "
    "Labels, divisor 15, no_sync and DDP's average are right. Fix: last.transpose(0, 1).reshape(rows, -1) or torch.cat([last[0], last[1]], 1)."
)
