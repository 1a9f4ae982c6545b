"""Gemma (tied embeddings, one key-value head) under FSDP2, fully_shard per layer and on the root, three accumulated micro-batches with
set_requires_gradient_sync. After torchtitan and pytorch forum questions on accumulation with FSDP2: the flag reads the other way round than
no_sync.
"""

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from transformers import GemmaConfig, GemmaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, ACCUMULATION = 11, 7, 35, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return GemmaForCausalLM(
            GemmaConfig(
                vocab_size=VOCABULARY,
                hidden_size=14,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=6,
                intermediate_size=26,
                max_position_embeddings=16,
                use_cache=False,
                initializer_range=0.2,
            )
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        valid = torch.arange(LENGTH) < lengths
        return {
            "input_ids": ids,
            "attention_mask": valid.long(),
            "labels": ids.masked_fill(~valid, -100),
        }

    def loss_sum(self, model, rows):
        out = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
        labels = rows["labels"][:, 1:]
        loss = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh["dp"])
        fully_shard(model, mesh=ctx.mesh["dp"])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def sync(self, i):
        return i == ACCUMULATION - 1

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        total = (batch["labels"][:, 1:] != -100).sum()
        for i in range(ACCUMULATION):
            inputs = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            model.set_requires_gradient_sync(self.sync(i))
            loss, _ = self.loss_sum(model, inputs)
            (loss / total).backward()


class Buggy(Clean):
    def sync(self, i):
        return i != ACCUMULATION - 1


EXPECT = dict(
    right=[
        r"micro.?batch|accumul|micro.?step",
        r"miss|drop|lost|lack|not |never|n't|without|omit|only|skip|unsynced|left out|exclud",
    ],
    place=[
        r"last|final|third|micro.?batch(es)? \W?(2|3)\b|2 of|micro",
        r"(every|all|each) (param|gradient|rank|weight|tensor|shard)",
        r"rows?",
    ],
    wrong=[
        r"mean of (the )?means",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"(own|local) (count|denominator|number of (valid )?tokens)",
        r"divided (by|twice)",
        r"(first|second) micro.?batch\w* (is|was|are) (missing|dropped|lost|skipped|not)",
        r"embed\S* (alone|only)|only (the )?(embed|tied|lm_head)",
    ],
)
WHY = (
    "set_requires_gradient_sync is True for all micro-batches but the last, so what the last micro-batch of each rank gives stays in the "
    "unsharded accumulation and never gets reduce-scattered into .grad: the gradients, of all parameters on all ranks, hold only the first two "
    "micro-batches; the rows of the last are missing."
)
