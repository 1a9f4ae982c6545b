"""transformers' Qwen3-Next (two layers of full attention with an output gate, dense MLPs), tensor
parallel over two ranks: three query heads (2 and 1), one key head that both keep, o_proj by
columns; MLPs are computed by both. Three rows in micro-batches of two and one.

q_proj yields, head by head, the query and then the gate of this head.

Bug: the attention of the ranks takes the first half of its q_proj output for all queries and the
second for all gates. That agrees only where a rank has a single head. After ports of the gated
attention to tensor parallel trainers and inference engines.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextAttention,
    apply_rotary_pos_emb,
)

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
ROWS, T, VOCAB, HIDDEN, HEADS, HEAD = 3, 7, 17, 10, 3, 4
SHARES = [(0, 2), (2, 3)]


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class AttentionOfRanks(Qwen3NextAttention):
    def queries(self, x):
        both = self.q_proj(x).view(*x.shape[:-1], -1, 2 * HEAD)
        return both.chunk(2, -1)

    def forward(self, hidden_states, position_embeddings, attention_mask, **kwargs):
        x = CopyToRanks.apply(hidden_states, self.group)
        query, gate = self.queries(x)
        query = self.q_norm(query).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, HEAD))).transpose(1, 2)
        value = self.v_proj(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        heads = query.shape[1]
        key, value = (y.expand(-1, heads, -1, -1) for y in (key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling)
        out = out.transpose(1, 2) * gate.sigmoid()
        return SumOverRanks.apply(self.o_proj(out.flatten(2)), self.group), None


class AttentionOfRanksHalves(AttentionOfRanks):
    def queries(self, x):
        query, gate = self.q_proj(x).chunk(2, -1)
        return query.unflatten(-1, (-1, HEAD)), gate.unflatten(-1, (-1, HEAD))


class Clean:
    attention = AttentionOfRanks

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 88)
        config = Qwen3NextConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=9,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=1,
            head_dim=HEAD,
            num_experts=0,
            layer_types=["full_attention", "full_attention"],
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
            },
            max_position_embeddings=16,
            initializer_range=0.3,
            use_cache=False,
            attn_implementation="eager",
        )
        model = Qwen3NextForCausalLM(config)
        for name, p in model.named_parameters():
            if "norm" in name:
                nn.init.normal_(p, std=0.3)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 880)
        return {"ids": torch.randint(VOCAB, (ROWS, T), generator=g)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
        wanted = rows["ids"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        return loss, wanted.numel()

    def distribute(self, model, ctx):
        a, b = SHARES[ctx.coords["tp"]]
        for layer in model.model.layers:
            attention = layer.self_attn
            q, out = attention.q_proj, attention.o_proj
            q.weight = nn.Parameter(q.weight.detach()[a * 2 * HEAD : b * 2 * HEAD].clone())
            out.weight = nn.Parameter(out.weight.detach()[:, a * HEAD : b * HEAD].clone())
            attention.__class__ = self.attention
            attention.group = ctx.group("tp")
        return model

    def step(self, model, batch, ctx):
        for part in torch.arange(ROWS).split(2):
            loss, _ = self.loss_sum(model, {"ids": batch["ids"][part]})
            (loss / (ROWS * (T - 1))).backward()
        for name, p in model.named_parameters():
            if any(k in name for k in ("k_proj", "v_proj", "q_norm", "k_norm")):
                dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    attention = AttentionOfRanksHalves


EXPECT = dict(
    right=[
        r"gate|q_proj|quer",
        r"chunk|half|halves|interleav|layout|order|per head|head by head|unflatten|"
        r"permut|wrong (slice|rows|columns|part)|other (rows|columns|places)",
        r"head|interleav|layout|permut|places|order",
    ],
    place=[
        r"AttentionOfRanksHalves",
        r"\bqueries\b",
        r"q_proj\(x\)\.chunk",
        r"self_attn",
        r"q_proj",
    ],
    wrong=[
        r"(k_proj|v_proj|k_norm|q_norm).{0,40}(not|never|twice|missing).{0,20}(reduc|summed)",
        r"rotary.{0,40}(wrong|missing|position)",
        r"CopyToRanks.{0,40}(missing|absent|wrong)",
        r"causal mask",
        r"weight.{0,30}(cut|sharded|sliced).{0,30}(at the wrong|wrongly)",
    ],
)
WHY = """q_proj's output is laid out head by head: [query of head 0, gate of head 0, query of head
1, ...]. AttentionOfRanksHalves.queries chunks the whole output in two, so on rank 0 with its two
heads the gate of head 0 serves as query of head 1 and the query of head 1 as gate of head 0; rank
1 with one head is right. The forward differs and all gradients. A right cause says that queries
and gates are split wrongly (not per head). Fix: view(..., heads, 2 * HEAD).chunk(2, -1)."""
