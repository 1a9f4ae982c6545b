"""A transformers Gemma model under DDP on three ranks with two micro-batches each (no_sync for the first) and uneven rows; its RMSNorms are replaced by a fused autograd Function of the kind of Liger-Kernel, with an offset of 1 for Gemma:
y = x / rms(x) * (1 + weight). Next-token cross entropy with ignored labels; divisor: all labels of all ranks.

The bug: the Function was written for Llama; the offset was added in the forward and forgotten in the backward, so the gradient of the input is made with the weight alone. The gradient of the weight does not depend on the offset. After
linkedin/Liger-Kernel #74 (Gemma needs RMSNorm with 1.0 offset).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import GemmaConfig, GemmaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
VOCABULARY, TOKENS = 19, 6
PARTS = [[(0, 2), (2, 3)], [(3, 6), (6, 8)], [(8, 9), (9, 13)]]


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, offset_back):
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset_back
        return x * scale * (weight + offset)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        m = grad * (weight + ctx.offset)
        dx = scale * (m - normed * (m * normed).mean(-1, keepdim=True))
        dw = (grad * normed).flatten(0, -2).sum(0)
        return dx, dw, None, None, None


class FusedNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps
        self.offset_back = 1.0

    def forward(self, x):
        return FusedRMSNorm.apply(x, self.weight, self.eps, 1.0, self.offset_back)


def patch(module):
    for name, child in module.named_children():
        if isinstance(child, GemmaRMSNorm):
            setattr(module, name, FusedNorm(child))
        else:
            patch(child)


def language_loss(model, rows):
    logits = model(input_ids=rows["ids"], use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), rows["labels"][:, 1:].flatten(), reduction="sum"
    )


class Clean:
    offset_back = 1.0

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GemmaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            max_position_embeddings=16,
            initializer_range=0.3,
            attn_implementation="eager",
        )
        model = GemmaForCausalLM(config)
        for name, p in model.named_parameters():
            if "norm" in name:
                nn.init.normal_(p, std=0.3)
        patch(model)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        ids = torch.randint(VOCABULARY, (rows, TOKENS), generator=g)
        ignored = torch.rand(rows, TOKENS, generator=g) < 0.25
        return {"ids": ids, "labels": ids.masked_fill(ignored, -100)}

    def loss_sum(self, model, rows):
        return language_loss(model, rows), int((rows["labels"][:, 1:] != -100).sum())

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, FusedNorm):
                module.offset_back = self.offset_back
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        count, parts = int((batch["labels"][:, 1:] != -100).sum()), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (language_loss(model, rows) * ctx.world_size / count).backward()


class Buggy(Clean):
    offset_back = 0.0


EXPECT = dict(
    right=[
        r"(?i)norm",
        r"(?i)backward|input gradient|gradient (of|with respect to|that|it|for|to) (the |its )?(input|x\b|hands?|returns?|goes)|adjoint|hands? (back|on)",
    ],
    place=[r"(?i)FusedNorm|FusedRMSNorm|\bnorm\b|layernorm"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|wrong divisor|mean of means",
        r"(?i)divi(ded|des) by (its|their) own|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|the outputs? (is|are) wrong",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only (in )?(the )?(first|last) micro.?batch",
        r"(?i)model\.norm\.weight (is|has a) wrong",
        r"(?i)(self_attn|attention|mlp|lm_head|embed\w*)('s)? (own )?backward",
    ],
)
WHY = (
    "All three ranks, all micro-batches and rows. The forward is right. FusedRMSNorm.backward multiplies the incoming gradient by `weight` instead of `1 + weight` before it makes the gradient of the input; the gradient of the "
    "norm's own weight is right for a right incoming gradient. So model.norm.weight and the part of the embedding that comes from the tied output head are right; everything below the final norm gets a wrong gradient: the layers' "
    "attention and MLP weights, their layernorm weights, the input part of embed_tokens, and each of the four inner norms does it again. DDP's reduction, no_sync, the divisor and the labels are right. Fix: (weight + 1) in the "
    "backward as well."
)
