"""AdaLoRA of peft on a tiny Llama under DDP; the loss is what the model returns, divided by num_items_in_batch (tokens of all ranks and micro-batches)
and multiplied by the ranks, as Trainer does. peft's forward adds the orthogonality term to every loss it returns.
"""

import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, VOCABULARY, MICROS, WEIGHT = 8, 8, 41, 2, 0.05


def orthogonality(model):
    """peft's regulariser, on its own: the mean of |P P^T - 1| over the factors."""
    each = []
    for name, p in model.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            c = p @ p.T if "lora_A" in name else p.T @ p
            each.append(torch.linalg.matrix_norm(c - torch.eye(len(c), dtype=c.dtype)))
    return sum(each) / len(each)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        from peft import AdaLoraConfig, get_peft_model

        torch.manual_seed(self.seed)
        config = LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=24,
            vocab_size=VOCABULARY, max_position_embeddings=LENGTH, bos_token_id=0, eos_token_id=0,
            initializer_range=0.2,
        )  # fmt: skip
        adapters = AdaLoraConfig(
            init_r=4, target_r=2, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"],
            orth_reg_weight=WEIGHT, total_step=100, tinit=10, tfinal=50, task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(LlamaForCausalLM(config), adapters)
        for name, p in model.named_parameters():
            if "lora_" in name and p.requires_grad:
                torch.nn.init.normal_(p, std=0.4)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=g)
        lengths = torch.randint(3, LENGTH + 1, (ROWS, 1), generator=g)
        mask = torch.arange(LENGTH) < lengths
        return {"ids": ids * mask, "mask": mask, "labels": ids.masked_fill(~mask, -100)}

    def terms(self):
        return {"tokens": self.tokens, "orthogonality": self.orthogonal}

    def tokens(self, model, rows):
        logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits[:, :-1]
        labels = rows["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()

    def orthogonal(self, model, rows):
        return WEIGHT * orthogonality(model), 1

    def loss_sum(self, model, rows):
        loss, count = self.tokens(model, rows)
        return loss + count * self.orthogonal(model, rows)[0], count

    def weight(self, ctx):
        """Every rank and micro-batch adds the term once: a part of it each."""
        return WEIGHT / (ctx.world_size * MICROS)

    def distribute(self, model, ctx):
        model.peft_config["default"].orth_reg_weight = self.weight(ctx)
        return DistributedDataParallel(model)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = (mine["labels"][:, 1:] != -100).sum()
        dist.all_reduce(count)
        for i in range(MICROS):
            micro = {k: v.tensor_split(MICROS)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if i == MICROS - 1 else model.no_sync():
                loss = model(
                    input_ids=micro["ids"], attention_mask=micro["mask"], labels=micro["labels"],
                    num_items_in_batch=count,
                ).loss  # fmt: skip
                (loss * ctx.world_size).backward()


class Buggy(Clean):
    def weight(self, ctx):
        return WEIGHT


EXPECT = dict(
    right=[
        r"orthogonal|regulari|penalty|term",
        r"\b(6|six)\b|counted|times|every (rank|micro|call)|each (rank|micro|call)|factor|too (often|large|much)",
    ],
    place=[r"orthogonal|regulari|penalty|term|lora_[ab]|peft"],
    wrong=[
        r"(lora_e|tokens?\S* (term|loss)).{0,30}(is|are) wrong|tokens? .{0,20}counted \d",
        r"(own|local) (count|denominator|divisor)",
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"orthogonal\S* .{0,30}(lost|missing|never)",
        r"rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "peft adds orth_reg_weight * regulariser to the loss of every forward. The token term is divided by the tokens of all ranks and micro-batches, so it adds up "
    "right over ranks and backwards; the regulariser is not divided by anything, so each of 3 ranks adds it in each of 2 micro-batches and after the multiplication by "
    "the ranks and DDP's average it counts six times instead of once. Wrong on all ranks alike: lora_A and lora_B. lora_E, which the term does not reach, and the token "
    "term everywhere are right. The weight should be divided by ranks x micro-batches."
)
