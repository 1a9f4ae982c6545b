"""BERT of transformers tags tokens, prepared by accelerate (DDP); the collator pads to the longest row of the own rank, then pad_across_processes makes the
ranks' batches equally wide (a compiled model wants one shape). Divisor: the labelled tokens of all ranks, counted before. After the reports on pad_across_processes'
`pad_index` (default 0) for labels.
"""

import torch
from torch.nn import functional as F
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TAGS = 53, 5
LENGTHS = [5, 6, 4, 11, 7, 9, 3, 8]  # three rows, three rows, two
ROWS, LENGTH = len(LENGTHS), max(LENGTHS)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=17,
            max_position_embeddings=LENGTH, num_labels=TAGS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            initializer_range=0.2, attn_implementation="eager",
        )  # fmt: skip
        return BertForTokenClassification(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        real = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
        labels = torch.randint(TAGS, (ROWS, LENGTH), generator=g)
        inside = torch.rand(ROWS, LENGTH, generator=g) < 0.2  # pieces of a word but the first
        return {
            "input_ids": torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g) * real,
            "attention_mask": real.long(),
            "labels": labels.masked_fill(inside | ~real, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        return self.accelerator.prepare_model(model)

    def equally_wide(self, rows):
        widen = self.accelerator.pad_across_processes
        return {k: widen(v, dim=1, pad_index=-100 if k == "labels" else 0) for k, v in rows.items()}

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        longest = int(mine["attention_mask"].sum(1).max())
        mine = {k: v[:, :longest].contiguous() for k, v in mine.items()}
        count = self.accelerator.reduce((mine["labels"] != -100).sum(), reduction="sum")
        loss, _ = self.loss_sum(model, self.equally_wide(mine))
        self.accelerator.backward(loss * ctx.world_size / count)


class Buggy(Clean):
    def equally_wide(self, rows):
        return {k: self.accelerator.pad_across_processes(v, dim=1) for k, v in rows.items()}


EXPECT = dict(
    right=[
        r"target|label|token|class|position|padd|cross_entropy|loss",
        r"class 0|\b0\b.{0,60}(-100|none|no |ignored)|other targets|padd|extra|ignored|-100|positions? .{0,40}(7|8|9|10|11)|"
        r"(counts?|enter|weight|targets?|labels?|gradient|tokens?).{0,80}(where|that|which).{0,60}(single process|not|zero|no|exactly)",
    ],
    place=[r"classifier|loss|cross_entropy|label|target|token|logits"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward|goes wrong in \S*(bert|encoder|embedding)",
        r"(is|are|was|were) (never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"divides? by (its|their) own (count|number)|own (denominator|divisor)",
        r"backward of \S+ is wrong",
        r"rows? .{0,20}(never read|read twice)|rank 1\b.{0,60}other targets",
    ],
)
WHY = (
    "pad_across_processes fills the labels with its default 0 and not with -100, so the columns that rank 0 (own longest 6) and rank 2 (own longest 8) lack to the width of 11 become tokens of class 0: "
    "5 columns in each of rank 0's three rows, 3 in each of rank 2's two. They enter the loss although they are padding. Rank 1 holds the longest row and is right. The count was taken before, so the divisor is right, as are "
    "model, logits and reduction. Wrong are the targets at those positions on ranks 0 and 2, and thereby every parameter's gradient."
)
