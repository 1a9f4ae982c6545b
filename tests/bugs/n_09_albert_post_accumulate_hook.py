"""ALBERT (one layer used three times, tied decoder) with checkpointing, the gradients all-reduced in post-accumulate-grad hooks to overlap
with the backward, three micro-batches. After reports on hand-made overlap hooks that fire for every micro-batch: the accumulated, already
reduced gradient is reduced once more.
"""

import functools

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AlbertConfig, AlbertForMaskedLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY, MASK, ACCUMULATION = 10, 8, 31, 4, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = AlbertForMaskedLM(
            AlbertConfig(
                vocab_size=VOCABULARY,
                embedding_size=10,
                hidden_size=18,
                num_hidden_layers=3,
                num_hidden_groups=1,
                num_attention_heads=3,
                intermediate_size=23,
                max_position_embeddings=LENGTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                classifier_dropout_prob=0.0,
                initializer_range=0.2,
            )
        )
        group = model.albert.encoder.albert_layer_groups[0]
        group.forward = functools.partial(checkpoint, group.forward, use_reentrant=False)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(5, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        hidden = (torch.rand(ROWS, LENGTH, generator=g) < 0.3) & valid
        hidden[:, 2] = True
        return {
            "input_ids": ids.masked_fill(hidden, MASK).masked_fill(~valid, 0),
            "attention_mask": valid.long(),
            "labels": ids.masked_fill(~hidden, -100),
        }

    def loss_sum(self, model, rows):
        out = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
        labels = rows["labels"]
        loss = F.cross_entropy(out.logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        self.last, self.group = False, ctx.group("dp")
        for param in model.parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(self.hook)
        return model

    def hook(self, param):
        if self.last:
            dist.all_reduce(param.grad, group=self.group)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        total = (batch["labels"] != -100).sum()
        for i in range(ACCUMULATION):
            inputs = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            self.last = i == ACCUMULATION - 1
            loss, _ = self.loss_sum(model, inputs)
            (loss / total).backward()


class Buggy(Clean):
    def hook(self, param):
        dist.all_reduce(param.grad, group=self.group)


EXPECT = dict(
    right=[
        r"micro.?batch|accumul|earlier|already|previous",
        r"twice|again|repeat|more than once|re-?reduc|\d+ times|several times|too often|multipl|double|over.?count|over.?weigh|"
        r"(each|every|after) .{0,20}micro|already (been )?(reduced|summed)",
    ],
    place=[r"(every|all|each) (param|gradient|rank|weight|tensor)", r"micro|accumul", r"reduc"],
    wrong=[
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"mean of (the )?means",
        r"(own|local) (count|denominator|number of (valid )?tokens)",
        r"micro.?batch\w* (is|was|are) (missing|dropped|lost)",
        r"albert_layer\S* (alone|only)|only (the )?(shared|albert_layer|embed|tied)",
    ],
)
WHY = (
    "The hook reduces the accumulated .grad after every micro-batch, so what was reduced after an earlier micro-batch is reduced again: over "
    "two ranks the first micro-batch counts four times, the second twice, the third once. All parameters, on all ranks alike."
)
