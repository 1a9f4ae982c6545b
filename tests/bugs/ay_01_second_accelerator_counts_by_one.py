"""Fine-tuning of a text classifier (transformers, DistilBERT from scratch) with accelerate on three CPU ranks, three micro-batches each under `accelerator.accumulate`. The loss of a micro-batch is a sum over its rows, divided by the rows
of the whole batch; it is multiplied by the number of processes (DDP averages) and by the number of accumulation steps (`accelerator.backward` divides by it).

The bug: after the set-up a helper for the evaluation makes an Accelerator of its own, with default arguments. All Accelerators of a process share one GradientState, and the new one writes its own plugin (one step) into it. From then on
the first Accelerator's backward divides by one. After huggingface/accelerate #668 and #1233 (accumulation steps live in a shared state that every Accelerator sets).
"""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn import functional as F
from transformers import DistilBertConfig, DistilBertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
TOKENS, VOCABULARY, CLASSES, STEPS = 7, 19, 4, 3
PARTS = [[(0, 2), (2, 3), (3, 6)], [(6, 7), (7, 9), (9, 10)], [(10, 12), (12, 15), (15, 16)]]
ROWS = 16


def new_accelerator(**keywords):
    return Accelerator(cpu=True, **keywords)


class Evaluator:
    """Gathers predictions at the end of an epoch."""

    def __init__(self):
        self.accelerator = new_accelerator()

    def accuracy(self, model, rows):
        with torch.no_grad():
            right = model(rows["ids"], attention_mask=rows["mask"]).logits.argmax(-1)
        hits = (right == rows["label"]).to(torch.float64)
        return self.accelerator.gather_for_metrics(hits).mean()


class Clean:
    early_evaluator = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = DistilBertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
            dim=8,
            n_layers=2,
            n_heads=2,
            hidden_dim=12,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            num_labels=CLASSES,
            initializer_range=0.4,
            attn_implementation="eager",
        )
        model = DistilBertForSequenceClassification(config)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.1)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(3, TOKENS + 1, (ROWS,), generator=g)
        mask = torch.arange(TOKENS)[None] < length[:, None]
        ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=g)
        return {
            "ids": ids.masked_fill(~mask, 0),
            "mask": mask.long(),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], attention_mask=rows["mask"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = str(ctx.rank)
        os.environ["WORLD_SIZE"] = str(ctx.world_size)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = new_accelerator(gradient_accumulation_steps=STEPS)
        assert self.accelerator.num_processes == ctx.world_size
        model = self.accelerator.prepare(model)
        if self.early_evaluator:
            self.evaluator = Evaluator()
        return model

    def step(self, model, batch, ctx):
        scale = self.accelerator.num_processes * STEPS / len(batch["label"])
        for low, high in PARTS[ctx.rank]:
            rows = {k: v[low:high] for k, v in batch.items()}
            with self.accelerator.accumulate(model):
                logits = model(rows["ids"], attention_mask=rows["mask"]).logits
                loss = F.cross_entropy(logits, rows["label"], reduction="sum")
                self.accelerator.backward(loss * scale)


class Buggy(Clean):
    early_evaluator = True


EXPECT = dict(
    right=[
        r"(?i)factor|times|scaled?|divi|multipl|too (large|big)",
        r"(?i)(factor|times|by|is|of|exactly)( of)? (3|three)\b(?!/)|(3|three)(\.0+)? ?(x|times|×)|"
        r"number of (micro.?batches|accumulation)|accumulation|gradient_accumulation_steps",
    ],
    place=[r"(?i)all|every|whole|gradient|backward|accumul|loss"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|never (all.?)?reduced|(reduced|summed) twice|too (early|"
        r"late)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)wrong direction|forward (is|goes) wrong|other rows|padding",
        r"(?i)factor (of )?1/3|too small|divided twice",
    ],
)
WHY = (
    "Every gradient of every parameter on every rank is exactly 3 times the right one (the number of accumulation steps): the loss is multiplied by 3 so that accelerator.backward can divide by gradient_accumulation_steps = 3, but "
    "Evaluator() "
    "made a second Accelerator with default arguments, whose GradientAccumulationPlugin(num_steps=1) replaced the first one's in the shared GradientState, so backward divides by 1. (accumulate then also syncs after every micro-batch, "
    "which "
    "does no harm: the average of an average plus the next local gradient is right.) Direction, rows, reduction, forward are right. Fix: make one Accelerator, hand it to the helper, or pass the same gradient_accumulation_steps."
)
