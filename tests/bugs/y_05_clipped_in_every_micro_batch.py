"""LoRA on a small BERT classifier with peft, trained with accelerate: `with accelerator.accumulate(model)`, three micro-batches, four ranks. The data lie sorted by source, and so by class: every rank sees mostly one label, its own gradient is
large and the mean over ranks small. Gradients are clipped to a norm that the mean stays below, so that in a healthy step clipping changes nothing.

The bug: `accelerator.clip_grad_norm_` is called after every backward and not only `if accelerator.sync_gradients`. In the micro-batches before the last it clips the rank's own, not yet reduced sum.
huggingface/accelerate issue #641, huggingface/diffusers PR #721 (issue #499), tenstorrent/tt-metal issue #17568.
"""

import os

import torch
from accelerate import Accelerator
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ROWS, WIDTH, WORDS, CLASSES, MICRO, MOST = 22, 7, 19, 4, 3, 1.0


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        base = BertForSequenceClassification(
            BertConfig(
                vocab_size=WORDS,
                hidden_size=12,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=16,
                max_position_embeddings=WIDTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_labels=CLASSES,
                initializer_range=0.3,
                attn_implementation="eager",
            )
        )
        lora = LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=3,
            lora_alpha=6,
            lora_dropout=0.0,
            target_modules=["query", "value"],
            init_lora_weights=False,
        )
        return get_peft_model(base, lora)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(3, WIDTH + 1, (ROWS,), generator=g)
        return {
            "ids": torch.randint(WORDS, (ROWS, WIDTH), generator=g),
            "mask": (torch.arange(WIDTH) < length[:, None]).long(),
            "label": torch.arange(ROWS) * CLASSES // ROWS,
        }

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), len(rows["label"])

    def distribute(self, model, ctx):
        os.environ.update(
            {"RANK": str(ctx.rank), "LOCAL_RANK": str(ctx.rank), "WORLD_SIZE": str(ctx.world_size)}
        )
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
        return self.accelerator.prepare_model(model)

    def clip(self, accelerator, model):
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), MOST)

    def step(self, model, batch, ctx):
        accelerator = self.accelerator
        mine = {
            k: v.tensor_split(ctx.world_size)[ctx.rank].tensor_split(MICRO)
            for k, v in batch.items()
        }
        for m in range(MICRO):
            with accelerator.accumulate(model):
                loss = self.loss_sum(model, {k: v[m] for k, v in mine.items()})[0]
                accelerator.backward(loss * MICRO * ctx.world_size / ROWS)
                self.clip(accelerator, model)


class Buggy(Clean):
    def clip(self, accelerator, model):
        accelerator.clip_grad_norm_(model.parameters(), MOST)


EXPECT = dict(
    right=[
        r"micro.?batch",
        r"clip|norm|scale|factor|multipl|weigh|too small|shrunk|coefficient|0\.\d+",
    ],
    place=[r"clip|micro.?batch"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(reduced|summed|added) (twice|again)",
        r"micro.?batch\S* .{0,20}(lost|dropped|missing|overwritten|never read)",
        r"each rank .{0,20}own (count|number|denominator)",
        r"last micro.?batch .{0,30}(is wrong|too small|(is|was) (clipped|scaled))",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "After micro-batches 1 and 2 the rank's own, not yet reduced gradient (multiplied by 4 ranks / 22 rows) is clipped to a norm of 1.0: after the second it is above 1.0 on all ranks, after the first on some (with seed 0 on ranks 1 and 3). "
    "So the sum of the first micro-batch is multiplied by c1*c2 and that of the second by c2, with factors of each rank's own, c2 between about 0.5 and 0.7. "
    "The last micro-batch is added unclipped, the reduction by DDP in its backward is right, and the clipping after it finds the norm of the mean below 1.0 and changes nothing. So the gradient is one and the same on all ranks, but with rows "
    "of the first two micro-batches too light, differently on each rank; all trained parameters (lora_A, lora_B, classifier) by the same weights. Forward, rows, divisor and reduction are right. The fix is `if accelerator.sync_gradients:` before clip_grad_norm_."
)
