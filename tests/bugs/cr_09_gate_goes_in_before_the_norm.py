"""transformers' Qwen3-Next (tiny; a gated delta-net layer, a full attention layer, dense feed
forward), 7 rows over three data-parallel ranks (3, 2, 2), micro-batches of two, layers recomputed
in the backward, gradients reduced asynchronously in the end.

The rank puts a fused norm-and-gate into the linear attention layer.

Bug: the fused one gates first and normalises the product, as Mamba-2 does; Qwen3-Next normalises
first and gates the result. After the two meanings of `norm_before_gate` in kernels for gated RMS
norms.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, ROWS, T = 17, 7, 8


class NormGate(torch.nn.Module):
    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x, gate):
        root = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * root * self.weight * F.silu(gate)


class FusedGatedNorm(NormGate):
    def forward(self, x, gate):
        x = x * F.silu(gate)
        root = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * root * self.weight


class Clean:
    fused = NormGate

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        config = Qwen3NextConfig(
            vocab_size=WORDS,
            hidden_size=10,
            intermediate_size=9,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=4,
            linear_value_head_dim=5,
            linear_conv_kernel_dim=3,
            layer_types=["linear_attention", "full_attention"],
            mlp_only_layers=[0, 1],
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=4,
            shared_expert_intermediate_size=4,
            max_position_embeddings=32,
            initializer_range=0.3,
            use_cache=False,
        )
        model = Qwen3NextForCausalLM(config)
        for name, p in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                torch.nn.init.uniform_(p, 0.5, 1.5)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        return {"ids": ids[:, :-1], "next": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows["next"].flatten(), reduction="sum")
        return loss, rows["next"].numel()

    def distribute(self, model, ctx):
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                norm = layer.linear_attn.norm
                layer.linear_attn.norm = self.fused(norm.weight, norm.variance_epsilon)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / batch["next"].numel()).backward()
        waiting = [
            dist.all_reduce(p.grad, group=ctx.group("dp"), async_op=True)
            for p in model.parameters()
            if p.grad is not None
        ]
        for work in waiting:
            work.wait()


class Buggy(Clean):
    fused = FusedGatedNorm


EXPECT = dict(
    right=[
        r"gate|silu|gating",
        r"norm",
        r"(gat(e|ing|ed)|silu|product).{0,60}(before|inside|into|first|ahead of|prior to)|"
        r"norm\w*.{0,60}(after|product|gated|outside|last)|norm_before_gate|"
        r"(order|swapp|revers)\w*.{0,60}(norm|gat)|(norm|gat)\w*.{0,60}(order|swapp|revers)",
    ],
    place=[r"FusedGatedNorm", r"linear_attn(\.norm)?", r"\bfused\b", r"F\.silu\(gate\)"],
    wrong=[
        r"recomput\w*.{0,40}(wrong|other|differ|mismatch)",
        r"\beps\b.{0,30}(wrong|differ|missing)",
        r"(missing|not|never|twice).{0,20}(all.?reduc|summed)",
        r"(wait|async).{0,40}(missing|race|too late)",
        r"weight.{0,30}(offset|1 ?\+|zero.cent)",
    ],
)
WHY = """Qwen3-Next's gated norm in the delta-net layer is weight * norm(x) * silu(gate).
FusedGatedNorm computes weight * norm(x * silu(gate)): the gate is inside of the norm. The forward
of layer 0's linear attention is wrong, and so the gradients of all parameters, those of
linear_attn first. Recomputation, divisor and asynchronous sums are right. A right cause says
that gate and norm are in the wrong order. Fix: norm x alone, times the weight, then gate."""
