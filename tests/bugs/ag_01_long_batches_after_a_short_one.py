"""Token classification with BigBird (transformers, tiny config from scratch) under DDP on three ranks, documents bucketed by length: a micro-batch holds either short passages (8 tokens) or long ones (20 tokens); no_sync for all but
the last. Long ones are encoded with block-sparse attention, short ones (at most (5 + 2 * random blocks) * block size = 14 tokens) with full attention.

The bug: the library switches to full attention by itself when a short batch comes and never switches back, so long micro-batches that come after a short one are encoded with full attention; which ones depends on the order on each
rank. After huggingface/transformers issue 20031 (BigBird attention type switching).
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BigBirdConfig, BigBirdForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
SHORT, LONG, VOCABULARY, LABELS = 8, 20, 17, 5
LENGTHS = [8, 8, 20, 20, 20, 8, 8, 8, 20, 20, 20]
PARTS = [[(0, 2), (2, 4)], [(4, 5), (5, 7)], [(7, 8), (8, 10), (10, 11)]]


def type_of(length):
    return "original_full" if length <= 14 else "block_sparse"


class Clean:
    sticky = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = BigBirdForTokenClassification(
            BigBirdConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                classifier_dropout=0.0,
                initializer_range=0.4,
                max_position_embeddings=LONG,
                num_labels=LABELS,
                attention_type="block_sparse",
                block_size=2,
                num_random_blocks=1,
            )
        )
        model.bert.pooler = None
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = len(LENGTHS)
        return {
            "ids": torch.randint(3, VOCABULARY, (rows, LONG), generator=g),
            "labels": torch.randint(LABELS, (rows, LONG), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    @staticmethod
    def bucket_loss(model, ids, labels):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def loss_sum(self, model, rows):
        loss = 0.0
        for length in (SHORT, LONG):
            there = rows["length"] == length
            if there.any():
                model.bert.set_attention_type(type_of(length))
                ids, labels = rows["ids"][there, :length], rows["labels"][there, :length]
                loss = loss + self.bucket_loss(model, ids, labels)
        model.bert.set_attention_type("block_sparse")
        return loss, int(rows["length"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int(batch["length"].sum())
        model.module.bert.set_attention_type("block_sparse")
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            length = int(batch["length"][low])
            if not self.sticky:
                model.module.bert.set_attention_type(type_of(length))
            ids, labels = batch["ids"][low:high, :length], batch["labels"][low:high, :length]
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (self.bucket_loss(model, ids, labels) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    sticky = True


EXPECT = dict(
    right=[
        r"(?i)attention|encoder|\blayers?\b|forward|micro.?batch",
        r"(?i)forward|output|comput|state|switch|stays|kept|earlier|order|differs|other (type|path|kind|mode)",
        r"(?i)rank(s)? (0|2)|micro.?batch|rows? \d|attention",
    ],
    place=[r"(?i)attention|encoder|bert|layer|micro.?batch"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)labels? .{0,20}(is|are) wrong|embedding.{0,20}(forward|output).{0,15}wrong",
        r"(?i)(goes wrong|wrong).{0,30}(only )?on rank 1\b|all (three )?ranks.{0,30}(all|every) micro.?batch",
    ],
)
WHY = (
    "Rank 0: micro-batch 0 (rows 0, 1) is short, the model switches to full attention, and the long micro-batch 1 (rows 2, 3) is then encoded with full instead of block-sparse attention. Rank 2: micro-batch 0 (row 7) is short, the "
    "long micro-batches 1 and 2 (rows 8-10) are wrong in the same way. Rank 1 has its long micro-batch (row 4) first and is right, and short rows are right everywhere. The forward goes wrong in the self-attention of both layers "
    "(bert.encoder.layer.*.attention.self: other keys attended and softmax over more of them), the embeddings' output is right; the gradients of all parameters are wrong in direction, equal on all ranks after DDP's average. "
    "Divisor, no_sync, labels and reduction are right. Fix: set_attention_type for each micro-batch by its length."
)
