"""A tiny BertForMultipleChoice of transformers under DDP on two ranks, three micro-batches each (no_sync for the first two). The collator pads choice by choice and joins the columns: first choice of all questions, then second choice of
all, and so on; the joined block is made (questions, choices, tokens) again for the model. The divisor is the number of questions of both ranks.

The bug: the joined block, which lies as (choices, questions), is viewed as (questions, choices), so that the texts that compete in one softmax belong to several questions. After the flattening and un-flattening of choices in the
multiple choice collators of transformers (docs tasks/multiple_choice; huggingface/transformers PR 35199 translates the page), where the order of the loops has to fit.
"""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMultipleChoice

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
CHOICES, TOKENS, VOCABULARY, ROWS = 3, 6, 17, 11
PARTS = [[(0, 2), (2, 3), (3, 7)], [(7, 8), (8, 10), (10, 11)]]


def collate(rows, by_question):
    """Padded choice by choice, to the longest text of the micro-batch."""
    questions = len(rows["answer"])
    width = int(rows["length"].max())
    ids, mask = [], []
    for choice in range(CHOICES):
        text, length = rows["ids"][:, choice, :width], rows["length"][:, choice]
        there = torch.arange(width) < length[:, None]
        ids.append(text.masked_fill(~there, 0))
        mask.append(there.long())
    shape = (questions, CHOICES, width)
    ids, mask = torch.cat(ids), torch.cat(mask)
    if by_question:
        shape = (CHOICES, questions, width)
        ids, mask = (x.view(shape).transpose(0, 1).contiguous() for x in (ids, mask))
    else:
        ids, mask = ids.view(shape), mask.view(shape)
    return {"input_ids": ids, "attention_mask": mask, "labels": rows["answer"]}


class Clean:
    by_question = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=12,
            max_position_embeddings=TOKENS,
            initializer_range=0.4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        config._attn_implementation = "eager"
        return BertForMultipleChoice(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, CHOICES, TOKENS), generator=g),
            "length": torch.randint(3, TOKENS + 1, (ROWS, CHOICES), generator=g),
            "answer": torch.randint(CHOICES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        there = torch.arange(TOKENS) < rows["length"][..., None]
        ids = rows["ids"].masked_fill(~there, 0)
        out = model(input_ids=ids, attention_mask=there.long(), labels=rows["answer"])
        return out.loss * len(ids), len(ids)

    def distribute(self, model, ctx):
        return DistributedDataParallel(
            model, process_group=ctx.group("dp"), find_unused_parameters=False
        )

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = model(**collate(rows, self.by_question)).loss
                (loss * (high - low) * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    by_question = False


EXPECT = dict(
    right=[
        r"(?i)input_ids|ids|texts?|choices?|questions?|collate|view|rows|classifier|logits|embedding|tokens",
        r"(?i)order|other (places?|rows|questions|positions|texts)|permut|transpos|reshape|view|places|"
        r"mixed|swapp|belong|group|arrang|labels?|targets?",
    ],
    place=[
        r"(?i)collate|view|input_ids|ids\b|word_embeddings|embeddings|classifier|logits|cross_entropy|choices"
    ],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|no_sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)",
        r"(?i)(row|rows|texts) .{0,25}(never read|read twice|on no rank)",
        r"(?i)(attention|encoder|pooler)\S* (is|goes) wrong( itself)?|backward of \S+ is wrong",
        r"(?i)all micro.?batches (are|go) wrong|micro.?batch 1 (of|on) rank 0 .{0,15}wrong",
        r"(?i)padding .{0,20}(attended|wrong)|dropout",
    ],
)
WHY = (
    "collate joins the columns as (choices, questions) and views the block as (questions, choices) without a transpose. Slot (q, c) of a micro-batch with n questions holds choice (3q + c) // n of question (3q + c) % n. Each text is "
    "still read once and goes through the encoder rightly, with its own mask; but the logits of one softmax, and the place of the answer, belong to texts of several questions. Wrong: rank 0 micro-batches 0 (rows 0, 1) and 2 (rows 3-6), "
    "rank 1 micro-batch 1 (rows 8, 9); right are the micro-batches of one question: rank 0 micro-batch 1 (row 2), rank 1 micro-batches 0 and 2 (rows 7 and 10). Every parameter's gradient but classifier.bias (zero in sum either way, softmax "
    "shift) is wrong. Divisor 11, DDP and no_sync are right. Fix: view as (choices, questions, tokens) and transpose, or stack on dim 1."
)
