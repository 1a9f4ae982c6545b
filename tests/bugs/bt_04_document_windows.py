"""Extractive question answering on long documents with a BERT of transformers: a document of 14 tokens is read in three overlapping windows, one by each rank ("windows" axis, as with doc_stride), two micro-batches of
documents. Each window that contains the whole answer is trained on, with the positions relative to the window; the divisor is the number of such windows of all ranks. Gradients are summed over the ranks.

The bug: the positions relative to the window are handed to BertForQuestionAnswering as they come, relying on its "sometimes the start/end positions are outside our model inputs, we ignore these terms"; but the library
clamps to [0, length]: what lies beyond the end is ignored, whereas what lies before the window becomes its token 0 and is trained on. After the reports about clamp(0, ignored_index) in the question answering heads.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import BertConfig, BertForQuestionAnswering

TOPOLOGY = {"pools": {"train": {"axes": {"windows": 3}}}}
DOCUMENTS, TOKENS, WINDOW, STRIDE, VOCABULARY = 7, 14, 8, 3, 19
OUTSIDE = -100


def window_labels(rows, number):
    lo = number * STRIDE
    start, end = rows["start"] - lo, rows["end"] - lo
    inside = (start >= 0) & (end < WINDOW)
    return rows["ids"][:, lo : lo + WINDOW], start, end, inside


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=20,
            max_position_embeddings=WINDOW,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=0.3,
        )
        return BertForQuestionAnswering(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        start = torch.tensor([1, 4, 9, 11, 5, 2, 7])[torch.randperm(DOCUMENTS, generator=g)]
        return {
            "ids": torch.randint(1, VOCABULARY, (DOCUMENTS, TOKENS), generator=g),
            "start": start,
            "end": start + torch.randint(0, 3, (DOCUMENTS,), generator=g),
        }

    def loss_sum(self, model, rows):
        total, count = 0.0, 0
        for number in range(3):
            ids, start, end, inside = window_labels(rows, number)
            out = model(input_ids=ids)
            for logits, label in ((out.start_logits, start), (out.end_logits, end)):
                label = label.masked_fill(~inside, OUTSIDE)
                total = (
                    total
                    + F.cross_entropy(logits, label, ignore_index=OUTSIDE, reduction="sum") / 2
                )
            count = count + inside.sum()
        return total, count

    def features(self, rows, ctx):
        ids, start, end, inside = window_labels(rows, ctx.rank)
        start, end = start.masked_fill(~inside, WINDOW), end.masked_fill(~inside, WINDOW)
        return {"input_ids": ids, "start_positions": start, "end_positions": end}, inside.sum()

    def step(self, model, batch, ctx):
        group = ctx.group("windows")
        micro = [
            self.features({k: v.tensor_split(2)[n] for k, v in batch.items()}, ctx)
            for n in range(2)
        ]
        total = sum(answered for _, answered in micro)
        dist.all_reduce(total, group=group)
        for inputs, answered in micro:
            if answered:  # the library's mean over nothing is NaN
                (model(**inputs).loss * (answered / total)).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def features(self, rows, ctx):
        ids, start, end, inside = window_labels(rows, ctx.rank)
        return {"input_ids": ids, "start_positions": start, "end_positions": end}, inside.sum()


EXPECT = dict(
    right=[
        r"label|target|position|start|end|answer|window|clamp|ignor|mask|count|rows?|documents?|tokens?",
        r"clamp|token 0|first token|position 0|negative|outside|before the window|not ignored|should be ignored|ignor|mask|more (rows|labels|targets|documents|terms|tokens)"
        r"|(other|different|wrong|unlike|changed) (label|target|position)|rows? (that|which).{0,60}(not|should|none|zero)|in(side|cluded)|count(s|ed)?.{0,80}(not|more|also|too|should)",
    ],
    place=[
        r"features",
        r"BertForQuestionAnswering|modeling_bert|clamp",
        r"start_positions|end_positions|start|label|target",
        r"inside|masked_fill",
    ],
    wrong=[
        r"not reduced|reduced twice|never reduced|missing (all.?)?reduc|wrong group",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(wrong|other) (token )?ids|position embedding|padding",
        r"detached|no gradient|backward of",
    ],
)
WHY = (
    "An answer that starts before the window has a negative start_positions, which transformers clamps to 0, the window's first token, instead of ignoring it; likewise an answer that starts inside and ends beyond the end keeps "
    "its start (only its end is ignored). The second and third rank (and for overhanging answers the first) thus train on labels of windows that do not contain the answer, and the mean is taken over more labels than `answered` "
    "counts, so that right documents weigh less. Gradients of these ranks' contributions are wrong and with the sum all ranks' results. A right cause names targets outside the window that are not ignored (clamped to 0). "
    "Fix: set both positions to the ignored index where the answer is not inside."
)
