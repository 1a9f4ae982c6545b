"""Adapter tuning (peft LoRA on a BERT classifier of transformers, head in modules_to_save) on two ranks with three micro-batches each of uneven size and a reduction of its own: a hook on every trainable parameter sums the accumulated
gradient over the ranks during the backward of the last micro-batch. The divisor is the number of sentences of all ranks.

The bug: the hook is a tensor hook (register_hook), which runs before the gradient of this backward is added to .grad; it all-reduces .grad as the earlier micro-batches left it, and the last one is added afterwards, unsummed. As in
pytorch issue 76464 ("hooks on parameters ... fire BEFORE the gradients are accumulated", which led to register_post_accumulate_grad_hook, PR 107063).
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, TOKENS, VOCABULARY, CLASSES = 11, 6, 17, 4
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 7), (7, 10), (10, 11)]]


class Clean:
    early = False

    def __init__(self, seed=0):
        self.seed, self.last = seed, False

    def build(self):
        torch.manual_seed(self.seed)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=8,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=12,
                max_position_embeddings=TOKENS,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                initializer_range=0.3,
                num_labels=CLASSES,
            )
        )
        return get_peft_model(
            model,
            LoraConfig(
                task_type="SEQ_CLS",
                r=2,
                lora_alpha=3,
                lora_dropout=0.0,
                target_modules=["query", "value"],
                modules_to_save=["classifier"],
                init_lora_weights=False,
            ),
        )

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        group = ctx.group("dp")

        def total(param):
            if self.last and param.grad is not None:
                dist.all_reduce(param.grad, group=group)

        for param in model.parameters():
            if param.requires_grad and self.early:
                param.register_hook(lambda grad, param=param: total(param))
            elif param.requires_grad:
                param.register_post_accumulate_grad_hook(total)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            self.last = turn == len(parts) - 1
            loss, _ = self.loss_sum(model, {k: v[low:high] for k, v in batch.items()})
            (loss / ROWS).backward()


class Buggy(Clean):
    early = True


EXPECT = dict(
    right=[
        r"(?i)last|third|micro.?batch(es)? ?(2|3)\b|rows? (3|4|10)|final",
        r"(?i)not (been )?(all.?)?(reduced|summed)|unreduced|unsummed|miss|(reduc|sum).{0,40}(before|early|without|leav|first)"
        r"|after the (all.?)?(reduc|sum)|own (contribution|gradient|rows)|of the other ranks?|local",
    ],
    place=[
        r"(?i)hook|all.?reduc|reduction|last micro.?batch|micro.?batch(es)? ?(2|3)\b|rows? (3|4|10)"
    ],
    wrong=[
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)never (all.?)?reduced|no reduction at all|reduced twice|summed twice|counted twice",
        r"(?i)only the (classifier|adapter|lora)|(classifier|lora).{0,20}(alone|only) (is|are) wrong",
        r"(?i)first micro.?batch.{0,30}(lost|missing|dropped|unreduced|not (all.?)?reduced)",
        r"(?i)recomput|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "Rank 0 has micro-batches of rows 0-1, 2, 3-4, rank 1 of rows 5-6, 7-9, 10. During the last backward the tensor hook all-reduces .grad while it holds the sum of the first two micro-batches only; then autograd adds the gradient of "
    "the last micro-batch on each rank. So rank 0 ends with rows 0, 1, 2, 5-9 and its own 3, 4, without row 10; rank 1 with the same and its own row 10, without rows 3 and 4. The ranks' gradients differ, for all trainable parameters "
    "(lora_A, lora_B, classifier); the first two micro-batches are right. Forward, backward, loss, divisor 11, rows are right. Fix: register_post_accumulate_grad_hook, or reduce after the loop."
)
