"""A Mistral (grouped queries, sliding window) trained with accelerate: three accumulated micro-batches in `accelerator.accumulate`, the
losses summed and divided by the number of target tokens of the whole global batch, as the Trainer does it since `num_items_in_batch`. After
reports in huggingface/accelerate and transformers of a loss divided again by gradient_accumulation_steps.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY, ACCUMULATION = 9, 8, 37, 3


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=28,
                max_position_embeddings=16,
                sliding_window=4,
                use_cache=False,
                initializer_range=0.15,
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
        # what torchrun or accelerate launch would have set
        for name in ("", "LOCAL_"):
            os.environ[f"{name}RANK"] = str(ctx.rank)
            os.environ[f"{name}WORLD_SIZE"] = str(ctx.world_size)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
        assert self.accelerator.num_processes == ctx.world_size
        return self.accelerator.prepare(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        items = self.accelerator.reduce((mine["labels"][:, 1:] != -100).sum(), "sum")
        for i in range(ACCUMULATION):
            inputs = {k: v.tensor_split(ACCUMULATION)[i] for k, v in mine.items()}
            with self.accelerator.accumulate(model):
                loss, _ = self.loss_sum(model, inputs)
                # DDP averages over the processes
                loss = loss * self.accelerator.num_processes / items
                self.accelerator.backward(self.before_backward(loss))

    def before_backward(self, loss):
        # accelerator.backward divides by gradient_accumulation_steps
        return loss * self.accelerator.gradient_accumulation_steps


class Buggy(Clean):
    def before_backward(self, loss):
        return loss


EXPECT = dict(
    right=[
        r"1/3|third|0\.333|3 times|three times|\b3x|factor|scal|divid|divisor|too small|smaller",
        r"micro.?batch|accumul|num_micro|gradient_accumulation_steps|number of (micro|steps|parts|chunks)",
    ],
    place=[
        r"(every|all|each) (param|gradient|rank|weight|tensor)",
        r"micro|accumul",
        r"loss|backward|divi",
        r"whole|global|uniform",
    ],
    wrong=[
        r"mean of (the )?means",
        r"(not|never) (been )?(all.?)?(reduced|summed)",
        r"(counted|reduced|summed) (twice|again)",
        r"(own|local) (count|denominator|number of (valid )?tokens)",
        r"(last|first|one|a) micro.?batch\w* (is|was|are) (missing|dropped|lost|skipped)",
        r"only the (last|first) micro.?batch",
    ],
)
WHY = (
    "accelerator.backward divides the loss by gradient_accumulation_steps (3), but the loss is a sum divided by the count of the whole "
    "global batch already. Every gradient on every rank is exactly a third of the right one: one division by the number of micro-batches "
    "too many."
)
