"""A language model with differential attention (transformers' DiffLlamaAttention, real code) under hand-written tensor parallelism of the attention: q, k and v are column parallel, o is row parallel, and the lambda vectors, which each
rank sees with its own heads only, are summed over tp. Two replicas (dp) x two shards (tp), two micro-batches.

The bug: the projections are cut into contiguous blocks of heads, as for any Llama. But DiffLlama forms its difference between head h and head h + heads/2 (chunk in two halves along the heads, values too), so that a shard needs its part of
both halves; with contiguous blocks each rank takes differences between neighbours that do not belong together. After the default colwise plan of Llama-like models applied to DIFF-transformer heads.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaRotaryEmbedding,
)

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, LENGTH, VOCABULARY, WIDTH, HEADS, HEAD = 7, 6, 13, 16, 8, 2


class CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        fctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(fctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=fctx.group)
        return grad, None


class ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = DiffLlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            head_dim=HEAD,
            max_position_embeddings=LENGTH,
            attention_bias=False,
        )
        config._attn_implementation = "eager"
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = DiffLlamaAttention(config, layer_idx=1)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.GELU(), nn.Linear(11, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.rotary = DiffLlamaRotaryEmbedding(config)

    def forward(self, ids, enter=lambda t: t, leave=lambda t: t):
        x = self.embed(ids)
        length = ids.shape[1]
        causal = torch.full((length, length), -1e9, dtype=x.dtype).triu(1)[None, None]
        cos_sin = self.rotary(x, torch.arange(length)[None])
        y, _ = self.attn(enter(self.norm(x)), cos_sin, causal)
        x = x + leave(y)
        return self.head(x + self.mlp(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        return F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum"
        ), rows["ids"].numel()

    def heads_of_shard(self, tp, me):
        """The own part of the first half of the heads, and their partners in the second half."""
        first = torch.arange(HEADS // 2).chunk(tp)[me]
        return torch.cat([first, first + HEADS // 2])

    def distribute(self, model, ctx):
        tp, me = ctx.axes["tp"], ctx.coords["tp"]
        heads = self.heads_of_shard(tp, me)
        for proj in (model.attn.q_proj, model.attn.k_proj, model.attn.v_proj):
            weight = proj.weight.detach().unflatten(0, (HEADS, HEAD))[heads].flatten(0, 1)
            proj.weight = nn.Parameter(weight.clone())
        o = model.attn.o_proj
        o.weight = nn.Parameter(o.weight.detach().chunk(tp, 1)[me].clone())
        return model

    def step(self, model, batch, ctx):
        tp = ctx.group("tp")
        rows = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            ids, labels = (rows[k].tensor_split(2)[n] for k in ("ids", "labels"))
            logits = model(
                ids, lambda t: CopyToTP.apply(t, tp), lambda t: ReduceFromTP.apply(t, tp)
            )
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / batch["ids"].numel()).backward()
        for name, p in model.named_parameters():
            if "lambda_" in name:
                dist.all_reduce(p.grad, group=tp)
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def heads_of_shard(self, tp, me):
        return torch.arange(HEADS).chunk(tp)[me]


EXPECT = dict(
    right=[
        r"head|half|halves|pair|q_proj|k_proj|v_proj|cut|shard|layout|rows of|order|split",
        r"wrong|pair|order|contiguous|halves|half|interleav|differ|other|layout|mismatch|not (the )?(same|those)|permut|belong",
    ],
    place=[
        r"heads_of_shard",
        r"distribute",
        r"[qkv]_proj",
        r"o_proj",
        r"DiffLlamaAttention|\battn\b|attention",
    ],
    wrong=[
        r"lambda.{0,60}(not|never) (summed|reduced)|(not|never) reduced|reduced twice|missing all.?reduce",
        r"CopyToTP.{0,40}(missing|wrong)|ReduceFromTP.{0,40}(missing|wrong)",
        r"divisor|denominator|mean of means|micro.?batch(es)?.{0,30}(lost|dropped|overwritten)|labels?.{0,20}(shift|wrong)|causal mask",
    ],
)
WHY = (
    "With eight heads over two tp ranks the module pairs head h with h + 4 in the whole model, but with h + 2 inside a shard of four; heads_of_shard gives contiguous heads 0-3 and 4-7 where it has to give 0, 1, 4, 5 and 2, 3, 6, 7. "
    "So on all ranks differences are taken between heads that do not belong together (and the values are split into wrong halves), while o_proj's columns are those of the right pairs: the attention's forward and all gradients are wrong. "
    "A right cause says that q, k and v are cut into the wrong heads (order/pairing of heads in the shard). Fix: cut each half of the heads."
)
