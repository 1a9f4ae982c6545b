"""Named-entity tagging of long documents with BERT (transformers BertForTokenClassification) and accelerate on two ranks: each rank cuts its documents into windows of six tokens that overlap by two, in chunks of two documents as
datasets.map does, puts the windows of all chunks into one list and trains on micro-batches of three windows (accelerator.no_sync for all but the last). The first two tokens of a later window carry no label. Mean over the labelled
tokens of all ranks.

The bug: the mapping from window to document (overflow_to_sample_mapping) counts the documents within the chunk that was tokenised, but the labels are looked up with it in the list of all documents of the rank. Windows of the second and
third chunk get labels of documents 0 and 1 of the rank. As in huggingface/datasets issue 4755 (Dataset.map and overflow_to_sample_mapping) and transformers issue 10682 on labels of overflowing tokens.
"""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TAGS, LONGEST, WINDOW, STEP, CHUNK, MICRO = 17, 5, 14, 6, 4, 2, 3
LENGTHS = [9, 13, 5, 14, 6, 11, 7, 12, 10]
PART = [slice(0, 5), slice(5, 9)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=WINDOW,
            num_labels=TAGS,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
        )
        self.tagger = BertForTokenClassification(config)

    def forward(self, ids, mask):
        return self.tagger(input_ids=ids, attention_mask=mask).logits


def windows_of(rows, chunk, restarting):
    """All windows of these documents: tokens, which are there, and their labels (-100: none)."""
    number, begin = [], []
    source = []
    for first in range(0, len(rows["length"]), chunk):
        lengths = rows["length"][first : first + chunk].tolist()
        for document, length in enumerate(lengths):
            start = 0
            while True:
                number.append(document if restarting else first + document)
                source.append(first + document)
                begin.append(start)
                if start + WINDOW >= length:
                    break
                start += STEP
    number, source, begin = torch.tensor(number), torch.tensor(source), torch.tensor(begin)
    places = begin[:, None] + torch.arange(WINDOW)
    there = places < rows["length"][source][:, None]
    places = places.clamp(max=LONGEST - 1)
    ids = rows["ids"][source[:, None], places] * there
    new = there & ((begin[:, None] == 0) | (torch.arange(WINDOW) >= WINDOW - STEP))
    labels = rows["tags"][number[:, None], places].masked_fill(~new, -100)
    return ids, there.long(), labels


def tagging_loss(model, ids, mask, labels):
    return F.cross_entropy(
        model(ids, mask).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


class Clean:
    restarting = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "ids": torch.randint(1, VOCABULARY, (rows, LONGEST), generator=g),
            "tags": torch.randint(TAGS, (rows, LONGEST), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        windows = windows_of(rows, len(rows["length"]), False)
        return tagging_loss(model, *windows), int(rows["length"].sum())

    def distribute(self, model, ctx):
        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare_model(model)

    def step(self, model, batch, ctx):
        mine = {k: v[PART[ctx.rank]] for k, v in batch.items()}
        tokens = int(batch["length"].sum())
        windows = windows_of(mine, CHUNK, self.restarting)
        parts = list(zip(*(x.split(MICRO) for x in windows)))
        for turn, part in enumerate(parts):
            last = turn == len(parts) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                loss = tagging_loss(model, *part) * ctx.world_size / tokens
                self.accelerator.backward(loss)


class Buggy(Clean):
    restarting = True


EXPECT = dict(
    right=[
        r"(?i)labels?|targets?|tags?|loss",
        r"(?i)other|wrong|foreign|different|another|not (the )?(own|right)|shift|mis|index|mapping",
        r"(?i)rows?|documents?|windows?|micro.?batch|tokens?|chunk",
    ],
    place=[r"(?i)labels?|targets?|tags?|loss|windows_of"],
    wrong=[
        r"(?i)(not|never) (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,30}(wrong|late|early)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)backward of .{0,40}(wrong|incorrect)|wrong only in the backward",
        r"(?i)(embeddings?|attention|encoder|bert)[^.]{0,30} forward .{0,20}wrong|attention mask .{0,20}wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
    ],
)
WHY = (
    "Tokens, masks and the forward are right everywhere, so are the places within the documents; only the labels of some windows are those of another document. Rank 0 holds documents 0-4: chunk 1 (documents 2, 3) takes the tags of "
    "documents 0 and 1, chunk 2 (document 4) those of document 0. Rank 1 holds documents 5-8: chunk 1 (documents 7, 8) takes the tags of documents 5 and 6. Chunk 0 of each rank is right. Windows: rank 0 has 2 + 3 (right) and 1 + 3 + 1 "
    "(wrong), rank 1 has 3 + 2 (right) and 3 + 2 (wrong) -- micro-batches of three: the first is right on both ranks, the second has one wrong window on either, the later ones are all wrong. The number of labelled tokens (87) and which "
    "tokens have a label do not change. All gradients are wrong in direction, equally on both ranks after DDP's average. Fix: add the chunk's first document to the mapping (or look the labels up inside the mapped function)."
)
