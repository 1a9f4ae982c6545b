"""Continual learning of a small BertForSequenceClassification with accelerate on three ranks, three micro-batches of uneven size each. Elastic weight consolidation holds the encoder near the weights of the last task: a quadratic term, weighted
with the importance of each weight, counts once for the whole batch. It is added in the micro-batch in which gradients are synchronised.

The bug: accelerator.backward divides whatever it is given by gradient_accumulation_steps. The task's loss is multiplied by that number beforehand, the term, which is added afterwards, is not, and counts a third. After huggingface/accelerate
issue 3533 (double divide gradient_accumulation_steps) and huggingface/transformers issue 26312 on where the division takes place.
"""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS, CLASSES, STRENGTH = 15, 6, 3, 0.35
LENGTHS = [6, 4, 5, 6, 3, 6, 2, 5, 6, 4, 6, 3, 5, 6]
PARTS = [[(0, 1), (1, 3), (3, 5)], [(5, 7), (7, 8), (8, 9)], [(9, 11), (11, 13), (13, 14)]]


class Learner(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertForSequenceClassification(config)
        for n, p in enumerate(self.bert.bert.encoder.parameters()):
            self.register_buffer(f"old_{n}", p.detach() + 0.3 * torch.randn_like(p))
            self.register_buffer(f"importance_{n}", torch.rand_like(p))

    def forward(self, ids, length):
        seen = (torch.arange(ids.shape[1])[None] < length[:, None]).long()
        return self.bert(input_ids=ids, attention_mask=seen).logits

    def drift(self):
        total = 0.0
        for n, p in enumerate(self.bert.bert.encoder.parameters()):
            way = p - getattr(self, f"old_{n}")
            total = total + (getattr(self, f"importance_{n}") * way * way).sum()
        return 0.5 * STRENGTH * total


def task_loss(model, rows):
    return F.cross_entropy(model(rows["ids"], rows["length"]), rows["label"], reduction="sum")


class Clean:
    whole = True

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
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=CLASSES,
            initializer_range=0.3,
        )
        config._attn_implementation = "eager"
        return Learner(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(LENGTHS), TOKENS), generator=g),
            "length": torch.tensor(LENGTHS),
            "label": torch.randint(CLASSES, (len(LENGTHS),), generator=g),
        }

    def loss_sum(self, model, rows):
        return task_loss(model, rows), len(rows["label"])

    @property
    def terms(self):
        return {"task": self.loss_sum, "drift": lambda model, rows: (model.drift(), 1)}

    def distribute(self, model, ctx):
        os.environ.update(
            RANK=str(ctx.rank), LOCAL_RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size)
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=len(PARTS[0]))
        return self.accelerator.prepare(model)

    def step(self, model, batch, ctx):
        accelerator = self.accelerator
        plain = accelerator.unwrap_model(model)
        turns = accelerator.gradient_accumulation_steps
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            with accelerator.accumulate(model):
                loss = task_loss(model, rows) * ctx.world_size * turns / len(batch["label"])
                if accelerator.sync_gradients:
                    loss = loss + plain.drift() * (turns if self.whole else 1)
                accelerator.backward(loss)


class Buggy(Clean):
    whole = False


EXPECT = dict(
    right=[
        r"(?i)drift|term|penalty|consolidation",
        r"(?i)1/3|0\.33|third|divided by (3|three)|gradient_accumulation_steps|factor",
    ],
    place=[r"(?i)drift|term|penalty|backward|bb_03\w*\.py:\d+"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|no_sync.{0,40}(wrong|missing|too)",
        r"(?i)\btask\b.{0,40}(1/3|counts|is wrong|factor of)|mean of means|divi(ded|des) by (its|their) own (count|rows)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)labels? .{0,20}(is|are) wrong|wrong rows",
        r"(?i)(drift|term|penalty).{0,40}(only on rank|is missing|is lost|three times|twice)",
    ],
)
WHY = (
    "The term `drift` (EWC) counts 1/3 on every rank instead of 1: it is added only in the last of three micro-batches (sync_gradients), which is right as such, but accelerator.backward divides the loss by gradient_accumulation_steps = 3; the "
    "task's loss is multiplied by `turns` before and comes out right, the term is not. DDP's average of the same term on three ranks is the term itself. Wrong are the gradients of all parameters of bert.bert.encoder (the term's part has the "
    "factor 1/3); embeddings, pooler and classifier are right. Fix: multiply the term by gradient_accumulation_steps, or add it to each micro-batch."
)
