"""StarCoder2 with packed documents (block-diagonal mask, positions from zero in each document), FSDP2 without resharding after the forward
and a frozen input embedding. After packing reports in transformers (DataCollatorWithFlattening) and TRL: the last token of a document is
trained to predict the first of the next.
"""

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from transformers import Starcoder2Config, Starcoder2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY = 7, 12, 36


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Starcoder2ForCausalLM(
            Starcoder2Config(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=23,
                max_position_embeddings=LENGTH,
                sliding_window=None,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=1,
                tie_word_embeddings=False,
                residual_dropout=0.0,
                embedding_dropout=0.0,
                attention_dropout=0.0,
                initializer_range=0.2,
            )
        )
        model.model.embed_tokens.requires_grad_(False)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        start = torch.rand(ROWS, LENGTH, generator=g) < 0.25
        start[:, 5] = True
        return {
            "input_ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "document": start.long().cumsum(1),
        }

    @staticmethod
    def logits(model, rows):
        document, where = rows["document"], torch.arange(LENGTH)
        same = document[:, :, None] == document[:, None]
        attend = same & (where[:, None] >= where)
        position = where - same.long().argmax(-1)  # where a document starts
        out = model(
            input_ids=rows["input_ids"], position_ids=position, attention_mask=attend[:, None]
        )
        return out.logits[:, :-1]

    @staticmethod
    def labels(rows):
        document = rows["document"]
        return rows["input_ids"][:, 1:].masked_fill(document[:, 1:] != document[:, :-1], -100)

    def loss_sum(self, model, rows):
        labels = self.labels(rows)
        loss = F.cross_entropy(
            self.logits(model, rows).flatten(0, 1), labels.flatten(), reduction="sum"
        )
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            fully_shard(layer, mesh=ctx.mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=ctx.mesh["dp"], reshard_after_forward=False)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def collate(self, rows):
        return self.labels(rows)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        labels = self.collate(mine).flatten()
        loss = F.cross_entropy(self.logits(model, mine).flatten(0, 1), labels, reduction="sum")
        (loss / (self.collate(batch) != -100).sum()).backward()


class Buggy(Clean):
    def collate(self, rows):
        return rows["input_ids"][:, 1:]


EXPECT = dict(
    right=[
        r"label|target|token|position|loss|count|boundar|document|mask|objective",
        r"too many|more|extra|additional|include|contribut|boundar|across|should not|wrong|differ|other|mask|ignor|valid|shift|loss",
    ],
    place=[
        r"label|target|token|position|loss|logit|lm_head",
        r"(every|all|each) (param|gradient|rank|weight|tensor)",
    ],
    wrong=[
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?(rank |ranks' )?means",
        r"(own|local) (count|denominator)",
        r"embed_tokens\S* (is|has) (a )?(wrong|missing)",
        r"rows? (is|are|was|were) (missing|dropped|lost)",
    ],
)
WHY = (
    "The labels are the ids shifted by one without masking document ends, so the last token of each document is trained on the first of the "
    "next: extra label positions enter the loss and the count (a larger denominator). The logits and the reduction are right; all trainable "
    "parameters are off on all ranks."
)
