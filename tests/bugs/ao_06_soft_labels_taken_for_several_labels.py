"""A transformers DistilBERT-like sequence classifier (BertForSequenceClassification) under DDP on two ranks with two micro-batches each (no_sync for the first). Rank 0 reads rows with a class number, rank 1 rows with a distribution over
the classes (from annotators that disagree); both are meant to give a cross entropy with softmax, a sum over the rows. Divisor: all rows of both ranks.

The bug: the step leaves the loss to the model (labels=..., times the rows of the micro-batch). The problem type is not set; the model infers it from the dtype of the first labels it sees: integers are single_label_classification, floats
multi_label_classification. So rank 1 trains with a binary cross entropy per class, a mean over rows and classes. After huggingface/transformers #10232 and #14180 (problem_type inferred from labels).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS, CLASSES = 15, 6, 3
PARTS = [[(0, 4), (4, 6)], [(6, 7), (7, 11)]]


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=TOKENS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.4,
                num_labels=CLASSES,
            )
        )

    def forward(self, ids, mask, labels=None):
        out = self.bert(input_ids=ids, attention_mask=mask, labels=labels)
        return out.loss, out.logits


def soft_cross_entropy(logits, rows):
    hard = F.one_hot(rows["label"], CLASSES).to(logits.dtype)
    target = torch.where(rows["is_soft"][:, None], rows["soft"].to(logits.dtype), hard)
    return -(target * logits.log_softmax(-1)).sum()


class Clean:
    by_model = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Classifier()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        length = torch.randint(3, TOKENS + 1, (rows,), generator=g)
        return {
            "ids": torch.randint(VOCABULARY, (rows, TOKENS), generator=g),
            "mask": (torch.arange(TOKENS)[None] < length[:, None]).long(),
            "label": torch.randint(CLASSES, (rows,), generator=g),
            "soft": torch.randn(rows, CLASSES, generator=g).mul(1.5).softmax(-1),
            "is_soft": torch.arange(rows) >= PARTS[1][0][0],
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], rows["mask"])[1]
        return soft_cross_entropy(logits, rows), len(rows["ids"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count, parts = len(batch["ids"]), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                if self.by_model:
                    dtype = next(model.parameters()).dtype
                    soft = bool(rows["is_soft"].all())
                    labels = rows["soft"].to(dtype) if soft else rows["label"]
                    loss = model(rows["ids"], rows["mask"], labels)[0] * (high - low)
                else:
                    loss = soft_cross_entropy(model(rows["ids"], rows["mask"])[1], rows)
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    by_model = True


EXPECT = dict(
    right=[
        r"(?i)loss|gradient (of|with respect to|at|that reaches) (the )?(logits|output)|objective|binary|BCE|classifier",
        r"(?i)rank 1|rows? (6|7)|soft|is_soft|float",
        r"(?i)other|wrong|differ|binary|BCE|not (the|a) (softmax|cross|same|right)|multi.?label|sigmoid",
    ],
    place=[r"(?i)rank 1|rows? (6|7)|soft|loss"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice",
        r"(?i)no_sync.{0,40}(wrong|missing|too (early|late))|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)(the )?forward of (the )?(model|bert|encoder|classifier).{0,20}wrong|logits (are|is) wrong",
        r"(?i)(on )?rank 0('s)? .{0,20}(loss|rows?|gradient) (is|are) wrong|all ranks.{0,30}wrong loss",
        r"(?i)backward of .{0,40}(is )?wrong|wrong (in|only in) the backward",
        r"(?i)rows? .{0,20}(never read|skipped|read twice)",
        r"(?i)mean of means|only a (constant )?factor",
    ],
)
WHY = (
    "Rank 1, both micro-batches (rows 6 and 7-10, the ones with soft labels): the loss is BCEWithLogitsLoss, a sigmoid per class and a mean over rows and classes, times the rows, instead of -sum(p log_softmax). The forward of the "
    "model up to the logits is right on both ranks; the gradient at rank 1's logits is (sigmoid - p) / 3 instead of softmax - p, so wrong in direction and size, and so is everything below on both ranks after DDP's average. Rank "
    "0's rows 0-5 (integer labels, single label, mean times rows = sum) are right. Divisor 11, no_sync and reduction are right. Fix: compute the soft cross entropy from the logits (or give the problem type and convert)."
)
