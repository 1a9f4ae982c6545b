"""A GPT-NeoX language model of transformers (rotary_pct 2/3: of six features a head the first four are turned), tensor parallel over two ranks with a forward of our own on the library's weights: one of
the two heads and half of the MLP a rank, fused query-key-value rows per head, row-parallel outputs summed, bias added once; two micro-batches of three and two sentences.

The bug: the ranks' table of rotary angles has the right number of frequencies (two), but their exponents are divided by the size of the head, six, and not by the number of turned features, four. After
issues about partial rotary embeddings in ports of GPT-NeoX, Phi, StableLM and GLM (rotary_pct, partial_rotary_factor: dim of inv_freq taken from the head).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 2}}}}
WORDS, WIDTH, HEADS, INNER, LENGTH, ROWS = 17, 12, 2, 14, 9, 5


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def turn(x, cos, sin):
    n = cos.shape[-1]
    part, rest = x[..., :n], x[..., n:]
    left, right = part.chunk(2, -1)
    return torch.cat([part * cos + torch.cat([-right, left], -1) * sin, rest], -1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        config = GPTNeoXConfig(
            vocab_size=WORDS,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            max_position_embeddings=16,
            initializer_range=0.35,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 64.0,
                "partial_rotary_factor": 0.67,
            },
            attn_implementation="eager",
        )
        return GPTNeoXForCausalLM(config)

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}

    def loss_sum(self, model, rows):
        logits = model(input_ids=rows["ids"], use_cache=False).logits
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["labels"].numel()

    def shard_of(self, name, ctx):
        rank = ctx.rank
        if "query_key_value" in name:
            return (slice(18 * rank, 18 * rank + 18), slice(None))[
                : 2 if name.endswith("weight") else 1
            ]
        if "dense_h_to_4h" in name:
            return (slice(7 * rank, 7 * rank + 7), slice(None))[
                : 2 if name.endswith("weight") else 1
            ]
        if name.endswith("attention.dense.weight"):
            return (slice(None), slice(6 * rank, 6 * rank + 6))
        if name.endswith("dense_4h_to_h.weight"):
            return (slice(None), slice(7 * rank, 7 * rank + 7))
        return None

    def distribute(self, model, ctx):
        for name, p in list(model.named_parameters()):
            part = self.shard_of(name, ctx)
            if part is not None:
                owner = model.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], nn.Parameter(p.detach()[part].clone()))
        return model

    def frequencies(self, config):
        turned = int(
            config.hidden_size
            // config.num_attention_heads
            * config.rope_parameters["partial_rotary_factor"]
        )
        return config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, turned, 2, dtype=torch.float) / turned
        )

    def attention(self, layer, x, group):
        config = layer.config
        size = config.hidden_size // config.num_attention_heads
        x = F.linear(
            Enter.apply(x, group), layer.query_key_value.weight, layer.query_key_value.bias
        )
        q, k, v = x.unflatten(-1, (-1, 3 * size)).transpose(1, 2).chunk(3, -1)
        angles = torch.arange(x.shape[1])[:, None].float() * self.frequencies(config)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        scores = turn(q, cos, sin) @ turn(k, cos, sin).transpose(2, 3) * size**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        # the library's softmax, in float32 there as here
        out = (
            scores.masked_fill(later, float("-inf")).softmax(-1, dtype=torch.float32).to(v.dtype)
            @ v
        )
        out = F.linear(out.transpose(1, 2).flatten(2), layer.dense.weight)
        return Leave.apply(out, group) + layer.dense.bias

    def mlp(self, layer, x, group):
        x = F.gelu(
            F.linear(Enter.apply(x, group), layer.dense_h_to_4h.weight, layer.dense_h_to_4h.bias)
        )
        return (
            Leave.apply(F.linear(x, layer.dense_4h_to_h.weight), group) + layer.dense_4h_to_h.bias
        )

    def logits(self, model, ids, group):
        x = model.gpt_neox.embed_in(ids)
        for layer in model.gpt_neox.layers:
            attended = self.attention(layer.attention, layer.input_layernorm(x), group)
            x = x + attended + self.mlp(layer.mlp, layer.post_attention_layernorm(x), group)
        return model.lm_head(model.gpt_neox.final_layer_norm(x))

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            logits = self.logits(model, part["ids"], ctx.group("tp"))
            loss = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
            (loss / batch["labels"].numel()).backward()


class Buggy(Clean):
    def frequencies(self, config):
        size = config.hidden_size // config.num_attention_heads
        every = config.rope_parameters["rope_theta"] ** (
            -torch.arange(0, size, 2, dtype=torch.float) / size
        )
        return every[: int(size * config.rope_parameters["partial_rotary_factor"]) // 2]


EXPECT = dict(
    right=[
        r"rotary|rope|frequenc|angle|cos\b|sin\b|turn",
        r"exponent|partial|head.?(size|dim)|size of (the|a) head|\bsize\b|rotary_?(pct|ndims|dim)|number of turned|six|divided by|frequenc|inv_freq|theta|angles? (are|is|differ)",
    ],
    place=[r"frequencies", r"\battention\b", r"\bturn\b", r"rotary", r"angles"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own (tokens|rows)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(mlp|dense_4h_to_h|layernorm) (computes|is) .{0,20}wrong|(wrong|other) rows|causal mask",
    ],
)
WHY = (
    "Buggy.frequencies makes the exponents over the whole head (0/6, 2/6, 4/6) and keeps the first two, 1 and 64 ** -(1/3) = 1/4; the library makes them over the four turned features (0/4, 2/4), 1 and 64 ** -(1/2) = 1/8. "
    "So the second pair of turned features of queries and keys is turned too fast at every position but the first, on both ranks, in both layers and micro-batches: scores and attention outputs are wrong from the "
    "first layer on, and so loss and all gradients. The projections q, k and v before the turn are right, in the first layer, and so are reductions, bias and divisor. Fix: divide the exponents by the number of "
    "turned features, or take model.gpt_neox.rotary_emb."
)
