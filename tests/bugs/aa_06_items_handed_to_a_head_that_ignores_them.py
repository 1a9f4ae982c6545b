"""Named-entity recognition with transformers' BertForTokenClassification under FSDP2 (three ranks, sum of gradients), two micro-batches per rank, in the style of the Trainer since its gradient-accumulation fix: the labelled tokens of all
micro-batches and ranks are counted first, and the number goes to the model as `num_items_in_batch`.

The bug: the head takes `**kwargs` and does not use this one. BertForTokenClassification computes `CrossEntropyLoss()`, a mean over the labelled tokens of the micro-batch, and passes num_items_in_batch on to the encoder, where it is ignored. Origin:
huggingface/transformers reports on models that accept loss kwargs but do not use them (the model_accepts_loss_kwargs line of issues after the gradient accumulation fix of October 2024).
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from transformers import BertConfig, BertForTokenClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, WIDTH, WORDS, TAGS, MICRO, IGNORE = 13, 8, 29, 5, 2, -100


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return BertForTokenClassification(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=WIDTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                num_labels=TAGS,
                attn_implementation="eager",
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(2, WIDTH + 1, (ROWS,), generator=g)
        mask = torch.arange(WIDTH) < length[:, None]
        # first piece of each word only; the first token of a row begins a word
        first = mask & ((torch.rand(ROWS, WIDTH, generator=g) < 0.6) | (torch.arange(WIDTH) == 0))
        labels = torch.randint(TAGS, (ROWS, WIDTH), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, WIDTH), generator=g),
            "mask": mask.long(),
            "labels": labels.masked_fill(~first, IGNORE),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, int((rows["labels"] != IGNORE).sum())

    def distribute(self, model, ctx):
        for part in (*model.bert.encoder.layer, model):
            fully_shard(part, mesh=ctx.mesh)
            part.set_force_sum_reduction_for_comms(True)
            part.set_gradient_divide_factor(1.0)
        return model

    def loss(self, model, rows, items):
        return self.loss_sum(model, rows)[0] / items

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        items = (mine["labels"] != IGNORE).sum()
        dist.all_reduce(items, group=ctx.group("dp"))
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            model.set_requires_gradient_sync(m == MICRO - 1)
            self.loss(model, rows, items).backward()


class Buggy(Clean):
    def loss(self, model, rows, items):
        return model(
            input_ids=rows["ids"],
            attention_mask=rows["mask"],
            labels=rows["labels"],
            num_items_in_batch=items,
        ).loss


EXPECT = dict(
    right=[
        r"(?i)micro.?batch|own|local|each rank",
        r"(?i)count|number|divi|mean|normali|denominator|tokens|labels|items",
    ],
    place=[r"(?i)loss|divi|count|number|mean|normali|denominator|weigh"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)rows? .{0,20}(never read|read twice)",
        r"(?i)divided by the rows|number of rows",
        r"(?i)targets? (is|are) (wrong|other)",
    ],
)
WHY = (
    "The head ignores num_items_in_batch and returns the mean over the labelled tokens of the own micro-batch; nothing divides by the number of all labelled tokens. Each of the six micro-batches (3 ranks x 2) is weighted 1 / own count instead of 1 / all. With seed 0 the labelled tokens are 10 and 7 on rank 0, 5 and 5 on rank 1, 8 and 7 on rank 2, 42 in all: "
    "micro-batches come out 4.2, 6, 8.4, 8.4, 5.25 and 6 times too heavy, on the whole about 6.1 times. All parameters, the same on all ranks (FSDP shards of one sum). Forward, targets, rows and the sum over ranks and micro-batches are right. Fix: compute the sum and divide by items (the logits of the model, own loss)."
)
