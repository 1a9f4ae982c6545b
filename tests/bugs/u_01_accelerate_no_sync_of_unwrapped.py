"""Qwen3 of transformers, prepared by accelerate; three micro-batches accumulated by hand with accelerator.no_sync(), and a DDP hook that sums
(the divisor is the number of tokens of all ranks). The unwrapped model is kept beside for generation and saving.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, LENGTH, VOCABULARY, MICROS = 7, 9, 43, 3


def sum_hook(_, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = Qwen3Config(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, hidden_size=16,
            intermediate_size=20, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
        return Qwen3ForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=g)
        mask = torch.arange(LENGTH) < lengths
        return {"ids": ids * mask, "mask": mask, "labels": ids.masked_fill(~mask, -100)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits[:, :-1]
        labels = rows["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def distribute(self, model, ctx):
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        model = self.accelerator.prepare_model(model)
        model.register_comm_hook(None, sum_hook)
        self.raw = self.accelerator.unwrap_model(model)
        return model

    def accumulating(self, model):
        return self.accelerator.no_sync(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"][:, 1:] != -100).sum()
        dist.all_reduce(count)
        for i in range(MICROS):
            micro = {k: v.tensor_split(MICROS)[i] for k, v in mine.items()}
            last = i == MICROS - 1
            with contextlib.nullcontext() if last else self.accumulating(model):
                loss, _ = self.loss_sum(model, micro)
                self.accelerator.backward(loss / count)


class Buggy(Clean):
    def accumulating(self, model):
        return self.accelerator.no_sync(self.raw)


EXPECT = dict(
    right=[
        r"micro.?batch|backward|call|accumulat|no_sync",
        r"again|more than once|twice|repeated|each (time|micro|backward)|every (time|micro|backward|call)|too early|early|already|counted|\b[24] ?(times|x|×)|times [24]|factor",
    ],
    place=[r"micro.?batch|backward|no_sync|reduc|hook|bucket|ddp"],
    wrong=[
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(own|local) (count|denominator|divisor|number of tokens)",
        r"(is|are|was|were) (never|not) (all.?)?reduced|missing all.?reduc|stays? on (its|their) rank",
        r"(averages?|mean) (where|instead of)",
        r"gradient of other targets|rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "accelerator.no_sync is given the unwrapped Qwen3, which has no no_sync of its own, so accelerate falls back to a null context and DDP reduces in every "
    "backward. Its hook sums what has been accumulated so far: after micro-batch 0 the gradient is already the sum over both ranks, and micro-batches 1 and 2 "
    "sum it again. On both ranks and in every parameter micro-batch 0 is counted four times, micro-batch 1 twice, micro-batch 2 once. Forward, loss, "
    "divisor and each backward are right; only the last backward should communicate."
)
