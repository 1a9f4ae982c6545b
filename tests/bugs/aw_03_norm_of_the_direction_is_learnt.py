"""Fine-tuning a tiny LlamaForCausalLM with DoRA of peft (q_proj and v_proj of both layers) under DDP on two ranks, three micro-batches each (no_sync for the first two). For training the adapted layers run in one product: the base
weight and the low-rank update are put together, every row is divided by its norm and multiplied by the magnitude. Only answer tokens count; the divisor is their number on both ranks.

The bug: peft, after section 4.3 of the paper, takes the norm of the direction for a constant (weight_norm.detach()), and the one-product path lets the gradient go through the norm. Forward and loss are the same. After huggingface/peft
PR 1474 (comments on weight_norm.detach()) and issue 2348 on how that norm is made.
"""

import contextlib
import types

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS = 13, 7
PROMPT = [2, 4, 3, 1, 5, 2, 3, 4, 2, 3]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 6), (6, 9), (9, 10)]]


def one_product(layer, keep_norm):
    """The forward of an adapted linear layer with a single matrix product."""

    def forward(self, x, *args, **kwargs):
        base, name = self.get_base_layer(), self.active_adapters[0]
        update = self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]
        direction = base.weight + update
        norm = torch.linalg.norm(direction, dim=1)
        if not keep_norm:
            norm = norm.detach()
        magnitude = self.lora_magnitude_vector[name].weight
        return F.linear(x, (magnitude / norm)[:, None] * direction, base.bias)

    layer.forward = types.MethodType(forward, layer)


def answer_loss(model, rows):
    logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
    place = torch.arange(1, TOKENS)
    target = rows["ids"][:, 1:].masked_fill(place[None] < rows["prompt"][:, None], -100)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")


class Clean:
    keep_norm = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            initializer_range=0.4,
        )
        config._attn_implementation = "eager"
        lora = LoraConfig(
            r=2,
            lora_alpha=3,
            target_modules=["q_proj", "v_proj"],
            use_dora=True,
            init_lora_weights=False,
        )
        model = get_peft_model(LlamaForCausalLM(config), lora)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "magnitude" in name:
                    p.mul_(1 + 0.3 * torch.rand_like(p))
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (len(PROMPT), TOKENS), generator=g),
            "prompt": torch.tensor(PROMPT),
        }

    def loss_sum(self, model, rows):
        return answer_loss(model, rows), int((TOKENS - rows["prompt"]).sum())

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, nn.Module) and hasattr(module, "lora_magnitude_vector"):
                one_product(module, self.keep_norm)
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        answers = int((TOKENS - batch["prompt"]).sum())
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (answer_loss(model, rows) * ctx.world_size / answers).backward()


class Buggy(Clean):
    keep_norm = True


EXPECT = dict(
    right=[
        r"(?i)lora|adapter|q_proj|v_proj|dora|norm",
        r"(?i)backward|gradient|detach",
        r"(?i)detach|constant|through the norm|norm of|another path|extra|more than|no_grad"
        r"|without graph|stop|backward of|own backward|(its|the) backward",
    ],
    place=[r"(?i)q_proj|v_proj|lora_[AB]|one_product|linalg.{0,3}norm|adapter"],
    wrong=[
        r"(?i)(?<!not )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed) (twice|again)|no_sync.{0,40}(wrong"
        r"|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)labels? .{0,20}wrong|other rows|wrong rows",
        r"(?i)only (on )?rank [01]\b",
        r"(?i)magnitude(_vector)?(\.\w+)* (has|gets) (no|a wrong) gradient",
    ],
)
WHY = (
    "In every adapted layer (q_proj and v_proj of layers 0 and 1) the norm of the rows of base weight + scaled lora_B @ lora_A must be a constant in the backward (peft detaches it). The one-product path does not detach it "
    "(torch.linalg.norm in one_product), so "
    "the gradient of lora_A and lora_B has a second part, through the norm: for each row the part of the gradient along the direction is taken out. Forward, logits, loss, all magnitudes, and the gradient that goes to the layer's input "
    "are right; lora_A and lora_B of the four layers are wrong, in direction, in all micro-batches on both ranks, equally after DDP's average. Divisor, no_sync and reduction are right. Fix: norm = norm.detach()."
)
