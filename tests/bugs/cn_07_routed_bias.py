"""transformers' GPT-OSS (tiny: two layers, five experts with biases, two per token): rows over dp
(2; 3 and 2 rows, micro-batches of two), experts over ep (2; experts 0-2 and 3-4). The tokens of a
row are on both ep ranks; each computes its own experts and the outputs are summed.

Bug: the local experts multiply the routing weight into the activation ahead of the down
projection, as fused kernels for experts without biases do. GPT-OSS has a bias behind the down
projection, which then comes in unweighted. After reports on ports of GPT-OSS experts to kernels
made for Mixtral.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "ep": 2}}}}
WORDS, D, INNER, EXPERTS, T, ROWS = 13, 7, 5, 5, 6, 5


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class LocalExperts(nn.Module):
    def __init__(self, whole, own, group):
        super().__init__()
        for name, p in whole.named_parameters():
            self.register_parameter(name, nn.Parameter(p.detach()[own].clone()))
        self.first, self.group = int(own[0]), group
        self.activation = whole._apply_gate

    def expert(self, i, x, weight):
        h = self.activation(x @ self.gate_up_proj[i] + self.gate_up_proj_bias[i])
        return (h @ self.down_proj[i] + self.down_proj_bias[i]) * weight

    def forward(self, hidden_states, router_indices, routing_weights):
        x = CopyIn.apply(hidden_states, self.group)
        weights = CopyIn.apply(routing_weights, self.group)
        out = torch.zeros_like(x)
        for i in range(self.down_proj.shape[0]):
            token, slot = torch.where(router_indices == self.first + i)
            y = self.expert(i, x[token], weights[token, slot, None])
            out = out.index_add(0, token, y)
        return SumOut.apply(out, self.group)


class Clean:
    local_experts = LocalExperts

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        config = GptOssConfig(
            vocab_size=WORDS,
            hidden_size=D,
            intermediate_size=INNER,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            max_position_embeddings=16,
            initializer_range=0.4,
            tie_word_embeddings=False,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        model = GptOssForCausalLM(config)
        for p in model.parameters():
            if p.ndim == 1 or p.shape[0] == EXPERTS:
                nn.init.normal_(p, mean=1.0 if p.ndim == 1 else 0.0, std=0.5)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 710)
        return {"ids": torch.randint(WORDS, (ROWS, T), generator=g)}

    def loss_sum(self, model, rows):
        ids = rows["ids"]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        return loss, ids[:, 1:].numel()

    def distribute(self, model, ctx):
        own = torch.arange(EXPERTS).tensor_split(ctx.axes["ep"])[ctx.coords["ep"]]
        for layer in model.model.layers:
            layer.mlp.experts = self.local_experts(layer.mlp.experts, own, ctx.group("ep"))
        return model

    def step(self, model, batch, ctx):
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {"ids": batch["ids"][part]})
            (loss / (ROWS * (T - 1))).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class ScaledActivationExperts(LocalExperts):
    def expert(self, i, x, weight):
        h = self.activation(x @ self.gate_up_proj[i] + self.gate_up_proj_bias[i])
        return torch.addmm(self.down_proj_bias[i], h * weight, self.down_proj[i])


class Buggy(Clean):
    local_experts = ScaledActivationExperts


EXPECT = dict(
    right=[
        r"bias",
        r"rout\w+|gate|weight(ed|ing)?\b|score|probabilit",
        r"un(weighted|scaled)|not (weighted|scaled|multiplied)|without|before|ahead|prior|outside|"
        r"only the (product|matmul)|order|misses|missing|lacks|after",
        r"expert|down_proj",
    ],
    place=[
        r"ScaledActivationExperts",
        r"down_proj_bias",
        r"\bexpert\b",
        r"h \* weight",
        r"addmm",
        r"mlp\.experts",
    ],
    wrong=[
        r"bias.{0,40}(added|counted|summed).{0,30}(each|every|both|all|per) (ep )?rank",
        r"(not|never|missing).{0,25}(all.?)?reduc\w* over (dp|ep)",
        r"(top.?k|router).{0,30}(normali[sz]ed|renormali[sz]).{0,20}(wrong|twice)",
        r"expert (index|offset|numbers?).{0,30}wrong",
        r"interleav",
        r"(clamp|limit|alpha).{0,30}(wrong|miss)",
    ],
)
WHY = """GPT-OSS gives weight * (h @ down_proj + down_proj_bias). ScaledActivationExperts.expert
multiplies h by the routing weight and adds the bias afterwards: weight * h @ down_proj +
down_proj_bias, so the bias is not weighted by the router. The outputs of the experts, and with
them all gradients, are wrong; that of down_proj_bias lacks the weight, the router no longer hears
from the bias. A right cause says that the bias of the down projection is outside the routing
weight. The fix is to scale the whole output (or the bias too)."""
