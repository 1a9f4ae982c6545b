"""Policy-gradient fine-tuning with a KL term to the reference model (TRL style; transformers' OPT from scratch, peft LoRA with bias="all") under DDP on two ranks with two micro-batches each. The loss of a completion token is
-advantage * log-probability + BETA * k3(reference, policy); the divisor is the number of completion tokens of the whole batch. The policy has been trained for some steps already: its LoRA matrices and biases differ from the base model's.

The bug: to save memory the reference log-probabilities are computed with the policy under `disable_adapter()`. With bias="all" the trained biases live in the base model and stay in force. After huggingface/peft PR #741 (warn when disabling
adapters and bias != 'none') and huggingface/trl PR #6975 (with such a config disabling the adapter does not recover the reference).
"""

import contextlib
import copy
import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import OPTConfig, OPTForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, TOKENS, PROMPT, VOCABULARY, BETA = 9, 9, 3, 17, 0.4
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 9)]]


def log_probs(model, rows):
    logits = model(input_ids=rows["ids"], attention_mask=rows["mask"]).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, rows["ids"][:, 1:, None]).squeeze(-1)


class Learner(nn.Module):
    def __init__(self, policy, reference):
        super().__init__()
        self.policy, self.reference = policy, reference.requires_grad_(False)
        self.save_memory = False

    def forward(self, rows):
        with torch.no_grad():
            if self.save_memory:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with self.policy.disable_adapter():
                        old = log_probs(self.policy, rows)
            else:
                old = log_probs(self.reference, rows)
        new = log_probs(self.policy, rows)
        kl = torch.exp(old - new) - (old - new) - 1
        loss = -rows["advantage"][:, None] * new + BETA * kl
        return (loss * rows["completion"][:, 1:]).sum()


class Clean:
    save_memory = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            word_embed_proj_dim=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=12,
            max_position_embeddings=TOKENS,
            dropout=0.0,
            attention_dropout=0.0,
            layerdrop=0.0,
            init_std=0.4,
            attn_implementation="eager",
        )
        base = OPTForCausalLM(config)
        reference = copy.deepcopy(base)
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], bias="all")
        policy = get_peft_model(base, lora)
        with torch.no_grad():
            for p in policy.parameters():
                if p.requires_grad:
                    p.add_(torch.randn_like(p) * 0.3)
        return Learner(policy, reference)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        length = torch.randint(PROMPT + 2, TOKENS + 1, (ROWS,), generator=g)
        place = torch.arange(TOKENS)[None]
        mask = (place < length[:, None]).long()
        ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=g)
        return {
            "ids": ids.masked_fill(mask == 0, 1),
            "mask": mask,
            "completion": mask * (place >= PROMPT),
            "advantage": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows), int(rows["completion"].sum())

    def distribute(self, model, ctx):
        model.save_memory = self.save_memory
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        tokens = int(batch["completion"].sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (model(rows) * ctx.world_size / tokens).backward()


class Buggy(Clean):
    save_memory = True


EXPECT = dict(
    right=[
        r"(?i)loss|reference|KL|target|forward|weight(s|ing)? of the (tokens|rows)|adapter|bias",
        r"(?i)reference|disable|adapter|no_grad|without (a )?grad|first (pass|forward|call)|loss|"
        r"bias",
    ],
    place=[r"(?i)reference|loss|adapter|policy|KL|bias"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor (of "
        r")?(1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|missing)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)padding is (counted|scored)|backward of .{0,30} is wrong|lora.{0,20}frozen",
    ],
)
WHY = (
    "On both ranks, in all micro-batches and rows, the reference log-probabilities (the no-grad pass in front of the policy's) come from the policy with its LoRA matrices off but with the trained biases (of q, k, v, out_proj, fc1, fc2 "
    "and the "
    "layer norms) instead of the frozen copy of the base model. So the KL term, 1 - exp(old - new) per completion token, pulls to a wrong model; the policy's own forward, its log-probabilities and the advantage term are right, and so are "
    "divisor, "
    'mask, no_sync and DDP. All trainable parameters (LoRA and biases) get a wrong gradient, the same on both ranks. Fix: a frozen reference copy, or bias="none".'
)
