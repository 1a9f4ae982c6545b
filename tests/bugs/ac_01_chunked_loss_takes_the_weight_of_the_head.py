"""LoRA finetuning of Qwen3 with peft under DDP (three ranks, three micro-batches each). The vocabulary is large in real life, so the logits are not kept: a chunked loss goes over a few tokens at a time and computes their logits and their loss, as the fused linear cross entropy kernels do
(Liger, cut-cross-entropy, the chunked losses of TRL). The head is among the targets of the adapter, as people do who train new words (`target_modules=["q_proj", "v_proj", "lm_head"]`).

The bug: the chunked loss asks the head for its weight, `head.weight`, and multiplies by that. On a LoRA layer `weight` is the frozen weight of the layer below, so the adapter of the head is neither in the logits nor does it learn. Origin: huggingface/trl issue 4612 ("liger_kernel loss implementation ignores
PEFT/LoRA adapters on lm_head").
"""

import contextlib

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3Config, Qwen3ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, MICRO, CHUNK, IGNORE = 11, 7, 31, 3, 5, -100


def of_the_module(head, hidden):
    return head(hidden)


def of_the_weight(head, hidden):
    return F.linear(hidden, head.weight)


class ChunkedLoss(nn.Module):
    """The decoder without its head, then the head on CHUNK tokens at a time."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.logits = of_the_module

    def forward(self, ids, labels):
        causal = self.model.get_base_model()
        hidden = causal.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        hidden, labels = hidden.flatten(0, 1), labels[:, 1:].flatten()
        total = hidden.new_zeros(())
        for h, y in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True):
            logits = self.logits(causal.lm_head, h)
            total = total + F.cross_entropy(logits, y, ignore_index=IGNORE, reduction="sum")
        return total


class Clean:
    logits = staticmethod(of_the_module)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=WORDS,
                hidden_size=16,
                intermediate_size=20,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=4,
                max_position_embeddings=16,
                initializer_range=0.3,
                tie_word_embeddings=False,
                attn_implementation="eager",
            )
        )
        adapter = LoraConfig(
            r=3,
            lora_alpha=6,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj", "lm_head"],
            init_lora_weights=False,  # as after some training
        )
        return ChunkedLoss(get_peft_model(model, adapter))

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH), generator=g)
        prompt = torch.randint(1, 5, (ROWS, 1), generator=g)
        return {"ids": ids, "labels": ids.masked_fill(torch.arange(LENGTH) < prompt, IGNORE)}

    @staticmethod
    def count(labels):
        return (labels[:, 1:] != IGNORE).sum()

    def loss_sum(self, model, rows):
        return model(rows["ids"], rows["labels"]), int(self.count(rows["labels"]))

    def distribute(self, model, ctx):
        model.logits = self.logits
        group = ctx.group("dp")
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = self.count(mine["labels"])
        dist.all_reduce(count, group=ctx.group("dp"))
        for m in range(MICRO):
            rows = {k: v.tensor_split(MICRO)[m] for k, v in mine.items()}
            with contextlib.nullcontext() if m == MICRO - 1 else model.no_sync():
                loss = model(rows["ids"], rows["labels"])
                (loss * ctx.world_size / count).backward()


class Buggy(Clean):
    logits = staticmethod(of_the_weight)


EXPECT = dict(
    right=[
        r"(?i)lm_head|head\b|logits|output layer",
        r"(?i)adapter|lora|not (called|used|run|reached)|never (called|used|run|entered)|bypass|unused|no gradient|forward",
    ],
    place=[r"(?i)lm_head|head\b|logits"],
    wrong=[
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by|wrong normali[sz]er|number of (rows|tokens)",
        r"(?i)labels? (is|are) (shifted|wrong|other)|targets? (is|are) (wrong|other|shifted)",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)goes wrong in .{0,60}(self_attn|q_proj|v_proj|layers\.[01])|first wrong .{0,60}(self_attn|q_proj|v_proj|layers\.[01])",
        r"(?i)(attention|masks?|positions?) (is|are) wrong",
    ],
)
WHY = (
    "The chunked loss multiplies by head.weight, which on a LoRA layer is the frozen weight of its base_layer; the module lm_head is never called, so its delta lora_B(lora_A(h)) * 2 is missing from the logits. On all ranks and in all micro-batches: lm_head.lora_A and lora_B get no gradient at all (None), "
    "and the gradients of the other adapters (q_proj and v_proj of both layers, lora_A and lora_B) are wrong, for the loss and its way back through the head are those of another model. The forward is right up to and including the final norm and goes wrong at the logits. All ranks agree after DDP's average. "
    "The labels and their shift, the count of tokens, the chunks, the average over ranks and the micro-batches are right. Fix: logits of the module, head(h), or of the merged weight base_layer.weight + scaling * B @ A."
)
