"""A long-context decoder trained chunk by chunk (11 tokens in chunks of 4, 4 and 3), rows over dp
(3 + 2 of 5), micro-batches of two rows. The forward runs over the chunks with a cache of detached
keys and values; the backward runs over them in reverse and hands each chunk the gradient of its
keys and values that later chunks have left in the cache.

Bug: each chunk has a cache tensor of its own (the earlier ones put together and detached anew). On
the way back only the gradient of the nearest later chunk's cache is handed on: what still later
chunks left for the early tokens is not added to it. After chunk-wise training of long sequences
with a hand-made key-value cache.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
ROWS, T, CHUNK, WORDS, D, HEADS = 5, 11, 4, 16, 8, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.out = nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 11), nn.Linear(11, D)

    def forward(self, x, past):
        n, t, _ = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(n, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys, values = k, v
        if past is not None:
            keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        seen = torch.ones(t, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - t)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        x = x + self.out(out.transpose(1, 2).reshape(n, t, D))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(T, D)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, WORDS, bias=False)

    def forward(self, ids, lo=0, cache=None):
        x, made = self.words(ids) + self.places(torch.arange(lo, lo + ids.shape[1])), []
        for i, layer in enumerate(self.layers):
            x, pair = layer(x, None if cache is None else cache[i])
            made.append(pair)
        return self.head(self.norm(x)), made


def longer(cache, made):
    if cache is None:
        return [tuple(t.detach().requires_grad_() for t in pair) for pair in made]
    return [
        tuple(torch.cat([a, b], 2).detach().requires_grad_() for a, b in zip(old, new, strict=True))
        for old, new in zip(cache, made, strict=True)
    ]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1010)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        labels = ids[:, 1:].clone()
        labels[1, :3], labels[4, 9:] = -100, -100
        return {"ids": ids[:, :-1].contiguous(), "labels": labels}

    def summed(self, logits, labels):
        logits, labels = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")

    def loss_sum(self, model, rows):
        loss = self.summed(model(rows["ids"])[0], rows["labels"])
        return loss, int((rows["labels"] != -100).sum())

    def hand_on(self, cache, later):
        left = [t.grad for pair in cache for t in pair]
        if later is None:
            return left
        return [a + b[:, :, : a.shape[2]] for a, b in zip(left, later, strict=True)]

    def chunks(self, model, ids, labels, tokens):
        done, cache = [], None
        for lo in range(0, T, CHUNK):
            logits, made = model(ids[:, lo : lo + CHUNK], lo, cache)
            loss = self.summed(logits, labels[:, lo : lo + CHUNK]) / tokens
            done.append((lo, loss, made, cache))
            cache = longer(cache, made)
        return done

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            later = None
            done = self.chunks(model, batch["ids"][part], batch["labels"][part], tokens)
            for lo, loss, made, cache in reversed(done):
                roots, grads = [loss], [None]
                if later is not None:
                    roots += [t for pair in made for t in pair]
                    grads += [g[:, :, lo:] for g in later]
                torch.autograd.backward(roots, grads)
                if cache is not None:
                    later = self.hand_on(cache, later)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def hand_on(self, cache, later):
        return [t.grad for pair in cache for t in pair]


EXPECT = dict(
    right=[
        r"later|last chunk|third|chunk 2|lost|drop|not added|overwrit|replac|accumulat|discard|"
        r"nearest|missing|ignor",
        r"grad",
        r"cache|key|value|\bk\b|\bv\b|chunk|hand_on|past|early|first",
    ],
    place=[r"\bhand_on\b", r"\blater\b", r"layers\.\d\.[kv]\b", r"\bcache\b", r"t\.grad"],
    wrong=[
        r"forward.{0,40}(is|are|gives?|comes?) (wrong|different|other)",
        r"(not|never|twice) (summed|reduced|all.?reduced)",
        r"(row|example|sample)s?.{0,30}(twice|dropped|missing|overlap)",
        r"(token|label).{0,30}(count|normali).{0,30}(wrong|local|own)",
        r"(position|places).{0,30}(wrong|restart|shift)",
    ],
)
WHY = """Three chunks; the cache of chunk 2 holds keys and values of chunks 0 and 1, that of chunk 1
those of chunk 0, as separate leaves. After the backward of chunk 1 its cache's .grad has only
what chunk 1 asked of chunk 0; what chunk 2 asked of chunk 0 is in `later`, [:, :, :4], and must be
added. Buggy.hand_on drops `later`, so that chunk 0's keys and values lack the gradient from
chunk 2 (k, v and all before them are wrong). Fix: add later[:, :, :lo] to the cache's gradient."""
