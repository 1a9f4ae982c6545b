"""Extractive question answering with a tiny BertForQuestionAnswering under DDP on three ranks, two micro-batches each (no_sync for the first). A row has a start and an end word, or no answer in this window; rows without an answer do
not count. Every micro-batch is cut to its longest row. The loss is written as in run_squad: positions are clamped to 0 .. width, and width (a place outside the window) is ignored. The divisor is the number of answered rows of all
ranks.

The bug: rows without an answer are marked with -100 as in language modelling. The clamp makes 0 of it, so they are trained to answer with the first word. After huggingface/transformers issues 1282 (start_position=0 when the span is
impossible) and 2418 / PR 2130 (which value is ignored), and the clamp in BertForQuestionAnswering.
"""

import contextlib

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForQuestionAnswering

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WIDTH, VOCABULARY = 9, 15
LENGTHS = [7, 9, 5, 6, 8, 4, 9, 7, 6, 5, 8, 7, 4]
ANSWERED = [1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1]
PARTS = [[(0, 2), (2, 4)], [(4, 7), (7, 9)], [(9, 12), (12, 13)]]


def span_loss(model, rows, unanswered=None):
    width = int(rows["length"].max())
    there = (torch.arange(width)[None] < rows["length"][:, None]).long()
    out = model(input_ids=rows["ids"][:, :width], attention_mask=there)
    mark = width if unanswered is None else unanswered
    total = 0.0
    for logits, place in ((out.start_logits, rows["start"]), (out.end_logits, rows["end"])):
        place = torch.where(rows["answered"].bool(), place, torch.full_like(place, mark))
        place = place.clamp(0, width)
        logits = logits.masked_fill(there == 0, float("-inf"))
        total = total + F.cross_entropy(logits, place, ignore_index=width, reduction="sum")
    return total


class Clean:
    unanswered = None

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=WIDTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        return BertForQuestionAnswering(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.tensor(LENGTHS)
        start = 1 + (torch.rand(len(LENGTHS), generator=g) * (length - 3)).long()
        end = start + (torch.rand(len(LENGTHS), generator=g) * (length - start)).long()
        return {
            "ids": torch.randint(1, VOCABULARY, (len(LENGTHS), WIDTH), generator=g),
            "length": length,
            "start": start,
            "end": end,
            "answered": torch.tensor(ANSWERED),
        }

    def loss_sum(self, model, rows):
        return span_loss(model, rows), int(rows["answered"].sum())

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        answered = int(batch["answered"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (span_loss(model, rows, self.unanswered) * ctx.world_size / answered).backward()


class Buggy(Clean):
    unanswered = -100


EXPECT = dict(
    right=[
        r"(?i)label|target|answer|ignor|mask|weight|row|position",
        r"(?i)loss|logit|qa_outputs|score|head|output",
        r"(?i)(rows?|labels?|targets?|answers?|positions?|loss).{0,160}(ignor|mask|extra"
        r"|should not|too many|unanswer|-100|not (to )?(be )?count|other|wrong|weight"
        r"|additional|more)|(ignor|mask|extra|unanswer|additional|other|wrong).{0,120}(rows?"
        r"|labels?|targets?|answers?|loss)",
    ],
    place=[r"(?i)loss|qa_outputs|logit|label|target|row|answer"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|no_sync.{0,40}(wrong"
        r"|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)goes wrong in the forward of (bert|embeddings|encoder|layer)|forward of (bert"
        r"|the encoder) is wrong",
        r"(?i)attention mask .{0,20}(is )?(wrong|missing)|padding is attended",
        r"(?i)only the last micro.?batch|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank 0 is wrong",
    ],
)
WHY = (
    "Rows 4, 9 and 10 have no answer in their window and must not be in the loss. In the step their start and end are -100, the clamp to 0 .. width makes 0, and the cross entropy, which ignores `width` only, counts them with the "
    "first word as target. "
    "Rank 1, micro-batch 0 (rows 4-6: row 4) and rank 2, micro-batch 0 (rows 9-11: rows 9 and 10) are wrong, rank 0 and the second micro-batches are right. The forward with all logits is right; the loss has three rows too many, "
    "so the gradient of the logits "
    "and with it of all parameters is wrong (extra terms), equally on all ranks after DDP's average. The divisor (10 answered rows), no_sync, mask and reduction are right. Fix: mark such rows with the width (any place outside the "
    "window), or leave them out."
)
