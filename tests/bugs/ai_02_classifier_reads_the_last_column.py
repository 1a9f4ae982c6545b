"""P-tuning (peft PromptEncoderConfig, three virtual tokens) of a tiny Llama sequence classifier (transformers, from a config), base model frozen, prompt encoder and score head trained, DDP on two ranks with three micro-batches each
(no_sync before the last). Rows are padded on the right to the longest row of their micro-batch; the class is read at the last real token. Sum of cross entropies divided by all rows.

The bug: peft hands inputs_embeds to the classifier, which therefore cannot see the padding and takes the last column of each row (a warning says so); rows shorter than the longest one of their micro-batch are classified at a padding
place. As in huggingface/transformers issues 16372 and 34218 (padding is not detected in inputs_embeds, the last position is taken), compare peft issue 3620.
"""

import contextlib

import torch
from peft import PromptEncoderConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForSequenceClassification
from transformers.utils import logging

logging.set_verbosity_error()
TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS, PAD, PROMPT, CLASSES, WIDTH = 17, 7, 0, 3, 4, 8
LENGTHS = [4, 7, 5, 5, 6, 3, 7, 2, 4, 6, 6]
PARTS = [[(0, 2), (2, 4), (4, 6)], [(6, 7), (7, 9), (9, 11)]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        base = LlamaForSequenceClassification(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                intermediate_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=32,
                num_labels=CLASSES,
                pad_token_id=PAD,
                initializer_range=0.5,
                use_cache=False,
                attn_implementation="eager",
            )
        )
        self.peft = get_peft_model(
            base,
            PromptEncoderConfig(
                task_type="SEQ_CLS", num_virtual_tokens=PROMPT, encoder_hidden_size=WIDTH
            ),
        )

    def forward(self, ids, lengths, last_column):
        mask = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
        out = self.peft(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        if last_column:
            return out.logits
        hidden = out.hidden_states[-1]
        last = hidden[torch.arange(len(ids)), PROMPT + lengths - 1]
        return self.peft.base_model.score(last)


def losses(model, rows, last_column):
    longest = int(rows["length"].max())
    logits = model(rows["ids"][:, :longest], rows["length"], last_column)
    return F.cross_entropy(logits, rows["label"], reduction="sum")


class Clean:
    last_column = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.tensor(LENGTHS)
        ids = torch.randint(1, VOCABULARY, (len(LENGTHS), TOKENS), generator=g)
        ids = ids * (torch.arange(TOKENS)[None] < lengths[:, None])
        label = torch.randint(CLASSES, (len(LENGTHS),), generator=g)
        return {"ids": ids, "length": lengths, "label": label}

    def loss_sum(self, model, rows):
        return losses(model, rows, False), len(rows["ids"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = losses(model, rows, self.last_column) * ctx.world_size / len(LENGTHS)
                loss.backward()


class Buggy(Clean):
    last_column = True


EXPECT = dict(
    right=[
        r"(?i)rows?|micro.?batch|column|place|position|padd?(ed|ing)|length",
        r"(?i)score|logits|head|pool|last (column|token|position|place)|forward|input of"
        r"|padd?(ed|ing)",
        r"(?i)wrong|differ|other|not (the )?(own|right|same)|padd?(ed|ing)|foreign|shorter",
    ],
    place=[r"(?i)score|logits|pool|head|last (column|token|position)|inputs_embeds"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced (twice|again)|(summed"
        r"|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)wrong only in the backward|goes wrong in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)"
        r"|only the last micro.?batch",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)labels? .{0,20}(is|are) (wrong|of|shifted)|no_sync .{0,30}(wrong|missing)",
        r"(?i)layers\.[01].{0,40}(forward|output) (is|goes) wrong|embed_tokens.{0,20}wrong",
    ],
)
WHY = (
    "All rows shorter than the longest of their micro-batch are wrong: rank 0: row 0 (4 of 7 tokens) in micro-batch 0 and row 5 (3 of 6) in micro-batch 2; rank 1: row 7 (2 of 4) in micro-batch 1. Micro-batches of equal "
    "lengths (rank 0: rows 2, 3; rank 1: row 6 and rows 9, 10) and the longest rows are right. The Llama layers compute the same as they should, at the real tokens and at the padding; the pooled place is wrong: score's logits "
    "of the last column (a padding token that sees prompt and text) are taken instead of those of the last real token. So the loss of three of eleven rows is another one, and the gradients of the prompt encoder (embedding and "
    "mlp) and of score are wrong in direction, the same on both ranks after DDP's average. The base model is frozen. Divisor 11, no_sync, labels and reduction are right. Fix: pad on the left, or take the logits at prompt + "
    "length - 1 from the attention mask."
)
