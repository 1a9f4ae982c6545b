"""transformers' GPT-NeoX (attention and MLP in parallel) with hand-written tensor parallelism,
three heads on two ranks.

Both branches are row-parallel and share one reduction per block. In the step the residual
stream, divided by the number of ranks, goes into that same reduction ("one fused add"), whose
backward is the identity, so the residual path carries only 1/tp of its gradient. After fused
parallel-residual blocks and the known mistake with a row-parallel bias / tp.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
HEAD = 4


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def cut(param, dim, sizes, rank):
    return nn.Parameter(param.detach().split(sizes, dim)[rank].clone())


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(71 + self.seed)
        config = GPTNeoXConfig(
            vocab_size=29,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=21,
            rotary_pct=0.5,
            max_position_embeddings=16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_parallel_residual=True,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
        model = GPTNeoXForCausalLM(config)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(81 + self.seed)
        return {"ids": torch.randint(29, (5, 7), generator=g)}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits[:, :-1]
        labels = rows["ids"][:, 1:]
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ), labels.numel()

    def distribute(self, model, ctx):
        rank = dist.get_rank(ctx.group("tp"))
        heads, ffn = [2 * 3 * HEAD, 3 * HEAD], [11, 10]
        for layer in model.gpt_neox.layers:
            qkv, dense = layer.attention.query_key_value, layer.attention.dense
            qkv.weight, qkv.bias = cut(qkv.weight, 0, heads, rank), cut(qkv.bias, 0, heads, rank)
            dense.weight = cut(dense.weight, 1, [2 * HEAD, HEAD], rank)
            up, down = layer.mlp.dense_h_to_4h, layer.mlp.dense_4h_to_h
            up.weight, up.bias = cut(up.weight, 0, ffn, rank), cut(up.bias, 0, ffn, rank)
            down.weight = cut(down.weight, 1, ffn, rank)
        return model

    def branches(self, layer, x, rope, group):
        """The rank's part of attention plus MLP."""
        b, t, _ = x.shape
        h = CopyToRanks.apply(layer.input_layernorm(x), group)
        qkv = layer.attention.query_key_value(h).view(b, t, -1, 3 * HEAD).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = apply_rotary_pos_emb(q, k, *rope)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        a = a.transpose(1, 2).reshape(b, t, -1)
        h = CopyToRanks.apply(layer.post_attention_layernorm(x), group)
        m = layer.mlp.act(layer.mlp.dense_h_to_4h(h))
        return a @ layer.attention.dense.weight.T + m @ layer.mlp.dense_4h_to_h.weight.T

    def block(self, layer, x, rope, group):
        y = SumOverRanks.apply(self.branches(layer, x, rope, group), group)
        return x + y + layer.attention.dense.bias + layer.mlp.dense_4h_to_h.bias

    def step(self, model, batch, ctx):
        group, core = ctx.group("tp"), model.gpt_neox
        x = core.embed_in(batch["ids"])
        rope = core.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in core.layers:
            x = self.block(layer, x, rope, group)
        logits = model.get_output_embeddings()(core.final_layer_norm(x))[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten()).backward()


class Buggy(Clean):
    def block(self, layer, x, rope, group):
        part = self.branches(layer, x, rope, group) + x / dist.get_world_size(group)
        y = SumOverRanks.apply(part, group)
        return y + layer.attention.dense.bias + layer.mlp.dense_4h_to_h.bias


EXPECT = {
    "right": [
        r"residual|skip (path|connection)|\bx ?/|shortcut|identity path",
        (
            r"1 ?/ ?(tp|world|2)|divid|half|halv|scaled (down )?by|factor|world.?size|"
            r"tp.?size|inside the (all-?)?reduc"
        ),
    ],
    "place": [r"\bblock\b", r"x / dist", r"SumOverRanks", r"residual", r"\bpart\b"],
    "wrong": [
        r"bias (is )?(added|counted|summed) (on every|by every|twice|per)",
        r"layer.?norms? (weights? |gradients? )?(is |are )?not (all-?)?reduced",
        r"(missing|no) (copy|CopyToRanks)|copy region",
        r"qkv (is )?(cut|split|layout)|head (layout|order)",
    ],
}

WHY = (
    "The residual stream is divided by the tensor-parallel size and summed together with the "
    "partial outputs of the two branches, so the forward is right; but the sum has an "
    "identity backward, so the division stays in the backward and the residual path passes on "
    "only 1/tp of its gradient. Wrong are the embedding and every parameter of the first "
    "block (with more blocks the factor compounds); the last block, the final norm and the "
    "head are right. A right cause says that the residual is divided by tp inside the "
    "reduction and its gradient is so halved. Fix: add x after the reduction."
)
