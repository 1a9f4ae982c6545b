"""A token-level pipeline (TeraPipe) of two stages made of transformers' LlamaDecoderLayer, times two replicas: every micro-batch goes through the stages in four chunks of two tokens; a chunk attends to the keys and values of the chunks before it, which
are kept detached, one leaf for each chunk that reads them. Backward runs over the chunks from the last to the first, and the gradients of the kept keys and values are handed on to the chunks that made them. Two micro-batches, gradients summed over "dp".

The bug: a chunk's keys and values are read by all chunks after it, but what they hand on is stored, not added, so that the gradient of the nearest reader replaces those of the later ones. After chunked long-context training (TeraPipe, ChunkFlow,
sequence-level 1F1B in Seq1F1B).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "pp": 2}}}}
ROWS, TOKENS, CHUNK, WIDTH, VOCABULARY, MICRO = 8, 8, 2, 8, 13, 2


class ChunkCache:
    """Gives an attention layer the keys and values before its chunk, and keeps what the chunk adds."""

    def __init__(self, past):
        self.past = past

    def update(self, key, value, layer_idx, *args, **kwargs):
        self.own = (key, value)
        return tuple(torch.cat((p, o), 2) for p, o in zip(self.past, self.own))


class TinyLlama(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            hidden_size=WIDTH,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=11,
            num_hidden_layers=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=TOKENS,
            attn_implementation="eager",
        )
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = LlamaDecoderLayer(config, 0)
        self.second = LlamaDecoderLayer(config, 1)
        self.norm = LlamaRMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)

    def run(self, layer, x, start=0, cache=None):
        n = torch.arange(start, start + x.shape[1])
        mask = torch.zeros(len(n), start + len(n), dtype=x.dtype)
        mask = mask.masked_fill(torch.arange(start + len(n)) > n[:, None], -1e9)
        rope = self.rotary(x, n[None])
        out = layer(x, attention_mask=mask[None, None], position_embeddings=rope, cache=cache)
        return out[0] if isinstance(out, tuple) else out

    def forward(self, ids):
        h = self.run(self.first, self.embed(ids))
        return self.head(self.norm(self.run(self.second, h)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return TinyLlama()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, TOKENS + 1), generator=g)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        return F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum"), rows[
            "ids"
        ].numel()

    def distribute(self, model, ctx):
        gone = ("second", "norm", "head") if ctx.coords["pp"] == 0 else ("embed", "first")
        for name in gone:
            setattr(model, name, None)
        return model

    def hand_on(self, grads, past):
        """Gives the gradients of what a chunk has read to the chunks before it."""
        for j in range(len(grads)):
            at = slice(j * CHUNK, (j + 1) * CHUNK)
            for which, leaf in enumerate(past):
                grads[j][which] = grads[j][which] + leaf.grad[:, :, at]

    def micro_batch(self, model, ids, labels, stage, peer, group):
        dtype = next(model.parameters()).dtype
        kept, keys, values = [], [], []
        empty = torch.zeros(len(ids), 1, 0, WIDTH // 2, dtype=dtype)
        for start in range(0, TOKENS, CHUNK):
            past = [torch.cat([empty, *part], 2).requires_grad_() for part in (keys, values)]
            cache = ChunkCache(past)
            if stage == 0:
                x = model.embed(ids[:, start : start + CHUNK])
                out = model.run(model.first, x, start, cache)
                dist.send(out.detach().contiguous(), peer, group=group)
            else:
                x = torch.empty(len(ids), CHUNK, WIDTH, dtype=dtype)
                dist.recv(x, peer, group=group)
                x.requires_grad_()
                h = model.run(model.second, x, start, cache)
                logits = model.head(model.norm(h)).flatten(0, 1)
                target = labels[:, start : start + CHUNK].flatten()
                out = F.cross_entropy(logits, target, reduction="sum") / (ROWS * TOKENS)
            keys.append(cache.own[0].detach())
            values.append(cache.own[1].detach())
            kept.append((x, out, cache.own, past))
        grads = [[torch.zeros_like(k), torch.zeros_like(v)] for k, v in zip(keys, values)]
        for n in reversed(range(len(kept))):
            x, out, own, past = kept[n]
            grad = torch.ones_like(out)
            if stage == 0:
                dist.recv(grad, peer, group=group)
            torch.autograd.backward([out, *own], [grad, *grads[n]])
            if stage == 1:
                dist.send(x.grad.contiguous(), peer, group=group)
            if n > 0:
                self.hand_on(grads[:n], past)

    def step(self, model, batch, ctx):
        mine = {k: x.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, x in batch.items()}
        stage, group = ctx.coords["pp"], ctx.group("pp")
        peer = dist.get_global_rank(group, 1 - stage)
        for n in range(MICRO):
            ids, labels = (mine[k].tensor_split(MICRO)[n] for k in ("ids", "labels"))
            self.micro_batch(model, ids, labels, stage, peer, group)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def hand_on(self, grads, past):
        for j in range(len(grads)):
            at = slice(j * CHUNK, (j + 1) * CHUNK)
            for which, leaf in enumerate(past):
                grads[j][which] = leaf.grad[:, :, at]


EXPECT = dict(
    right=[
        r"key|value|\bkv\b|cache|past|chunk|hand_on|grads\[j\]|leaf",
        r"overwrit|overwrot|replac|assign|stored|not (added|accumulat|summed)|instead of (add|accumulat|sum)|only the (last|nearest|next)|lost|later|dropped|missing|part of|incomplete|discard",
    ],
    place=[
        r"hand_on",
        r"leaf\.grad|past",
        r"k_proj|v_proj",
        r"keys and values|\bkv\b|cache",
        r"self_attn",
    ],
    wrong=[
        r"detach(ed)? .{0,40}(cuts|cause)|no gradient at all",
        r"(missing|no|never).{0,20}all.?reduce|not reduced|reduced twice|wrong group",
        r"micro.?batch(es)? .{0,30}(lost|dropped|overwritten|wrong)|divisor|mean of means",
        r"position|rotary|mask|recv buffer|receive buffer|forward .{0,20}is wrong",
    ],
)
WHY = (
    "The keys and values of chunk j are read by all chunks after it, each through a leaf of its own. In the backward, from the last chunk to the first, Buggy's hand_on assigns the leaf's gradient to grads[j] in place of adding it, so that only chunk j+1's "
    "share is left when chunk j is walked back; chunks 0 and 1 lose those of two and one later chunks. This is so in both stages, on all four ranks and in both micro-batches: k_proj and v_proj and all that is below them is wrong, the head and the "
    "second layer's mlp are right. A right cause says that the gradient of the cached keys and values is overwritten (later chunks' shares are lost). Fix: add."
)
