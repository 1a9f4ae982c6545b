"""Named entity tagging with BertForTokenClassification (transformers) under DDP on two ranks, two micro-batches each of uneven size. The tags are unbalanced; the cross-entropy has class weights 1 / sqrt(count), counted once over the
whole data set. Sub-words and padding have the label -100. The divisor is the number of tagged tokens of all ranks. One of the five tags (2) does not occur.

The bug: the counts come from unique(labels, return_counts=True), -100 included, and are used by position. -100 is the first value and tag 2 is absent, so there are five values, no error, and tags 0 and 1 get the weights of -100 and
of 0. As in NVIDIA-NeMo/Speech PR 524 (fix class weighting for missing classes), and scikit-learn PR 1746 (weights for classes that are not numbered 0 .. n - 1).
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, TOKENS, VOCABULARY, TAGS = 9, 7, 19, 5
PARTS = [[(0, 2), (2, 5)], [(5, 8), (8, 9)]]


def class_weights(labels, by_position):
    if by_position:
        counts = torch.unique(labels, return_counts=True)[1]
    else:
        counts = torch.bincount(labels[labels >= 0], minlength=TAGS)
    return counts.clamp(min=1).rsqrt()


class Clean:
    by_position = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return BertForTokenClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=TOKENS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                num_labels=TAGS,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        drawn = torch.randint(10, (ROWS, TOKENS), generator=g)
        tags = torch.tensor([0, 0, 0, 0, 1, 1, 3, 4, -100, -100])[drawn]
        tags[:, 0] = torch.tensor([0, 1, 3, 4, 0, 1, 0, 4, 3])
        tags[:, -1] = -100
        return {"ids": torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=g), "labels": tags}

    def tagging_loss(self, model, rows, by_position):
        logits = model(input_ids=rows["ids"]).logits
        weights = class_weights(self.batch()["labels"], by_position).to(logits.dtype)
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), weight=weights, reduction="sum"
        )

    def loss_sum(self, model, rows):
        return self.tagging_loss(model, rows, False), int((rows["labels"] >= 0).sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] >= 0).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = self.tagging_loss(model, rows, self.by_position)
                (loss * ctx.world_size / tokens).backward()


class Buggy(Clean):
    by_position = True


EXPECT = dict(
    right=[
        r"(?i)loss|weight(s|ed|ing)? of|class.?weight|token|label|tag|logits",
        r"(?i)weight|scale|factor|differ|wrong|other",
        r"(?i)class|tag|label|loss|token|logits",
    ],
    place=[r"(?i)\bloss\b|class.?weights?|logits|cross.?entropy|labels?"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own|padding (is|tokens are) counted",
        r"(?i)forward of (the )?(model|bert|encoder|embeddings?).{0,20}wrong|goes wrong in the forward of (bert|the (encoder|embed))",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)(other|wrong|foreign) (rows|sentences)|labels? (is|are) shifted",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput",
    ],
)
WHY = (
    "The forward is right; the loss is not: on both ranks, in all micro-batches, tokens of tag 0 are weighted with the weight of -100 and tokens of tag 1 with that of tag 0 (unique gives -100, 0, 1, 3, 4: positions 0 and 1 belong to "
    "-100 and 0; position 2 belongs to 1 and is not used, tag 2 is absent; positions 3 and 4 are right by chance). Tokens of tags 3 and 4 and the ignored ones are right. With seed 0 there are 20 ignored tokens, 19 of tag 0, 11 of tag "
    "1: tag 0 gets 1/sqrt(20) for 1/sqrt(19) (2.5 % too little), tag 1 gets 1/sqrt(19) for 1/sqrt(11) (24 % too little). So all gradients are wrong in direction, equally on both ranks after DDP's average. Labels, divisor (tagged "
    "tokens), no_sync, reduction are right. Fix: bincount(labels[labels >= 0], minlength=TAGS)."
)
