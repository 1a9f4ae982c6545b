"""Transformers' OLMo-2 (norms behind attention and MLP), from a small config, under DDP with two
micro-batches per rank and tokens counted over all ranks. The gammas of the norms behind the
MLPs start at zero, so that each block begins as its attention alone.

Bug: a memory-efficient RMSNorm saves its output and divides it by the weight in the backward to
get the normalised input back; where the weight is zero nothing is left to divide. After apex's
memory_efficient=True norms, which clamp gamma by magnitude before they divide.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import Olmo2Config, Olmo2ForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCAB, TIME, ROWS = 37, 9, 7


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        inv = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inv)
        return x * inv * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, inv = ctx.saved_tensors
        unit = x * inv
        scaled = grad * weight
        grad_x = inv * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        return grad_x, (grad * unit).flatten(0, -2).sum(0), None


class LeanNorm(torch.autograd.Function):
    """Saves the output, which the next matmul keeps alive in any case, and not the input."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        inv = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        y = x * inv * weight
        ctx.save_for_backward(y, weight, inv)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, grad):
        y, weight, inv = ctx.saved_tensors
        magnitude = weight.abs().clamp(min=ctx.eps)
        unit = y / torch.where(weight < 0, -magnitude, magnitude)
        scaled = grad * weight
        grad_x = inv * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        return grad_x, (grad * unit).flatten(0, -2).sum(0), None


class RMSNorm(nn.Module):
    kernel = None

    def __init__(self, weight, eps):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.eps = eps

    def forward(self, x):
        if self.kernel is None:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return self.kernel.apply(x, self.weight, self.eps)


def replace_norms(module):
    for name, child in list(module.named_children()):
        if type(child).__name__ == "Olmo2RMSNorm":
            setattr(module, name, RMSNorm(child.weight, 1e-6))
        else:
            replace_norms(child)


class Clean:
    kernel = FusedNorm

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        config = Olmo2Config(
            vocab_size=VOCAB,
            hidden_size=12,
            intermediate_size=21,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=3,
            max_position_embeddings=16,
            initializer_range=0.3,
            tie_word_embeddings=False,
            use_cache=False,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
        model = Olmo2ForCausalLM(config)
        replace_norms(model)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.post_attention_layernorm.weight.uniform_(0.5, 1.5)
                layer.post_feedforward_layernorm.weight.zero_()
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 300)
        ids = torch.randint(1, VOCAB, (ROWS, TIME), generator=g)
        length = torch.tensor([9, 8, 9, 7, 4, 5, 6])[:, None]
        labels = torch.where(torch.arange(TIME) < length, ids, -100)
        return {"ids": ids, "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"]).logits[:, :-1]
        labels = rows["labels"][:, 1:]
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, int((labels != -100).sum())

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, RMSNorm):
                module.kernel = self.kernel
        return DDP(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        total = int((batch["labels"][:, 1:] != -100).sum())
        own = torch.arange(ROWS).tensor_split(size)[rank]
        parts = own.tensor_split(2)
        for i, part in enumerate(parts):
            model.require_backward_grad_sync = i == len(parts) - 1
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss * size / total).backward()


class Buggy(Clean):
    kernel = LeanNorm


EXPECT = dict(
    right=[
        "norm",
        "zero",
        r"output|divi[ds]|reconstruct|rebuil[td]|recover|recomput|y\s?/\s?|invert",
    ],
    place=[
        "LeanNorm",
        "post_feedforward_layernorm",
        r"\bunit\b|magnitude|clamp",
        "memory.?efficient",
    ],
    wrong=[
        "no_sync|require_backward_grad_sync",
        "unused param",
        r"token count|normali[sz]\w+ by (the )?(local|own)",
        "frozen|requires_grad",
        "q_norm|k_norm",
        "weights? (are|is) not (synchroni|broadcast)",
    ],
)
WHY = (
    "LeanNorm saves y and restores the normalised input as y / gamma, with gamma clamped away "
    "from zero. The gammas of post_feedforward_layernorm start at zero, so y is zero, the "
    "restored unit is zero, and the gradient of gamma, sum(grad * unit), is exactly zero on "
    "all ranks; it can never leave zero, and the MLPs behind it never learn. Wrong is "
    "post_feedforward_layernorm.weight of both layers (and in later steps what would depend "
    "on it); all other gradients, of norms with gammas unlike zero too, are right. A right "
    "cause says that the norm's backward rebuilds the normalised input from the output by "
    "dividing by a weight that is zero. Fix: save the input (FusedNorm), or use the memory- "
    "efficient kernel only for norms that don't start at zero."
)
