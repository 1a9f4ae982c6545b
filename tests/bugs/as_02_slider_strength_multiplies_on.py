"""Concept slider with peft: a tiny GPT-2 with LoRA on its projections is trained at several adapter strengths; every micro-batch holds rows of one strength, and the strength is put into the LoRA layers with scale_layer (what diffusers'
scale_lora_layers calls). DDP on two ranks, three micro-batches each (no_sync for the first two), sum of token losses / (rows x tokens); only the adapter is trained.

The bug: the strength is taken back (unscale_layer) once at the beginning of the step and not after each micro-batch. scale_layer multiplies what it finds, so the second micro-batch runs at the product of two strengths and the third at
that of three. As in huggingface/diffusers issue 5414 and PR 5417, huggingface/peft PRs 1027 and 1029 (scale and unscale of LoRA layers).
"""

import contextlib

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
TOKENS, VOCABULARY, WIDTH = 6, 13, 8
# strength and rows of every micro-batch
PARTS = [[(0.5, 0, 2), (3.0, 2, 3), (1.5, 3, 5)], [(2.0, 5, 6), (1.0, 6, 8), (0.5, 8, 9)]]
STRENGTHS = [s for parts in PARTS for s, low, high in parts for _ in range(high - low)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        base = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_positions=TOKENS,
                n_embd=WIDTH,
                n_layer=2,
                n_head=2,
                initializer_range=0.3,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        self.lm = get_peft_model(
            base,
            LoraConfig(
                r=2,
                lora_alpha=4,
                lora_dropout=0.0,
                target_modules=["c_attn", "c_proj"],
                fan_in_fan_out=True,
            ),
        )
        for name, p in self.lm.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.4)

    def adapters(self):
        return [m for m in self.lm.modules() if isinstance(m, LoraLayer)]

    def forward(self, ids):
        return self.lm(input_ids=ids, use_cache=False).logits


def scale(model, strength):
    for layer in model.adapters():
        layer.scale_layer(strength)


def unscale(model, strength=None):
    for layer in model.adapters():
        layer.unscale_layer(strength)


def token_loss(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


class Clean:
    take_back = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(STRENGTHS), TOKENS + 1), generator=g),
            "strength": torch.tensor(STRENGTHS),
        }

    def loss_sum(self, model, rows):
        total = 0.0
        for strength in rows["strength"].unique().tolist():
            unscale(model)
            scale(model, strength)
            total = total + token_loss(model, rows["ids"][rows["strength"] == strength])
        unscale(model)
        return total, rows["ids"][:, 1:].numel()

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count = batch["ids"][:, 1:].numel()
        parts = PARTS[ctx.rank]
        unscale(model.module)
        for turn, (strength, low, high) in enumerate(parts):
            scale(model.module, strength)
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss = token_loss(model, batch["ids"][low:high])
                (loss * ctx.world_size / count).backward()
            if self.take_back:
                unscale(model.module, strength)


class Buggy(Clean):
    take_back = False


EXPECT = dict(
    right=[
        r"(?i)forward|adapter|lora|scal|strength|output",
        r"(?i)micro.?batch|rows?|strength|accumulat",
        r"(?i)wrong|other|different|differ|not the|deviat|earlier|previous|before|product|carr",
        r"(?i)lora|adapter|c_attn|c_proj|attn|transformer|\blm\b|scal",
    ],
    place=[r"(?i)lora|adapter|c_attn|c_proj|scale_layer|strength|\.h\.0|transformer"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)forward (is|agrees|was) (right|correct)|wrong only in the backward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|no_sync.{0,40}(wrong|missing)",
        r"(?i)(only|just) (on )?rank [01]\b|rank [01] alone",
        r"(?i)in (all|every|each) micro.?batch|the first micro.?batch .{0,20}wrong",
        r"(?i)labels? (is|are) (wrong|shifted)|causal mask",
    ],
)
WHY = (
    "scale_layer multiplies the LoRA scaling in place and nothing divides it back between micro-batches. Rank 0: micro-batch 0 (rows 0, 1) at 0.5, right; micro-batch 1 (row 2) at 0.5 * 3 = 1.5 instead of 3; micro-batch 2 (rows 3, 4) "
    "at 2.25 instead of 1.5. Rank 1: micro-batch 0 (row 5) at 2, right; micro-batch 1 (rows 6, 7) at 2 * 1 = 2 instead of 1; micro-batch 2 (row 8) at 1 instead of 0.5. So rows 2, 3, 4, 6, 7 and 8 run a forward with the wrong adapter "
    "strength, beginning at c_attn of block 0, and the gradients of all lora_A and lora_B are wrong, equally on both ranks after DDP. State carried from one micro-batch to the next; divisor 54, reduction and no_sync are right. Fix: "
    "unscale_layer(strength) after each micro-batch, or set_scale instead of scale_layer."
)
