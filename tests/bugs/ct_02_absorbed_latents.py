"""A decoder with multi-head latent attention (DeepSeek's MLA) over three context-parallel ranks
(11 tokens: 4, 4, 3), rows in micro-batches of two. The ranks gather only the normed latent and
the shared rotary key over time and run the absorbed form: the key up-projection goes into the
query, the value up-projection behind the weighted sum, so that keys and values are never made.

Bug: the absorbed attention takes its softmax scale from the width of what it multiplies (latent
plus rotary) and not from the width of the head's query (nope plus rotary). After ports of MLA to
absorbed kernels whose `head_dim` is that of the latent cache.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, T, WORDS, D, HEADS, NOPE, ROPE, LATENT, VALUE = 5, 11, 17, 12, 2, 4, 2, 9, 3


class GatherTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[1], group
        full = x.new_zeros(x.shape[0], T, x.shape[2])
        full[:, lo : lo + x.shape[1]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.lo : ctx.lo + ctx.own], None, None


def rotate(x, places):
    inverse = 100.0 ** -(torch.arange(0, ROPE, 2, dtype=x.dtype, device=x.device) / ROPE)
    angle = places.to(x.dtype)[:, None] * inverse
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def absorbed(q, q_rope, latent, k_rope, up_k, lo):
    q_latent = torch.einsum("nhtc,hcl->nhtl", q, up_k)
    scores = q_latent @ latent[:, None].mT + q_rope @ k_rope[:, None].mT
    scores = scores * (q.shape[-1] + q_rope.shape[-1]) ** -0.5
    future = torch.arange(T) > torch.arange(lo, lo + q.shape[2])[:, None]
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ latent[:, None]


def absorbed_as_one_key(q, q_rope, latent, k_rope, up_k, lo):
    query = torch.cat([torch.einsum("nhtc,hcl->nhtl", q, up_k), q_rope], -1)
    key = torch.cat([latent, k_rope], -1)[:, None]
    scores = query @ key.mT * query.shape[-1] ** -0.5
    future = torch.arange(T) > torch.arange(lo, lo + q.shape[2])[:, None]
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ latent[:, None]


class LatentAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, HEADS * (NOPE + ROPE), bias=False)
        self.down = nn.Linear(D, LATENT + ROPE, bias=False)
        self.norm = nn.RMSNorm(LATENT, eps=1e-6)
        self.up_k = nn.Parameter(torch.randn(HEADS, NOPE, LATENT) * 0.6)
        self.up_v = nn.Parameter(torch.randn(HEADS, VALUE, LATENT) * 0.4)
        self.o = nn.Linear(HEADS * VALUE, D, bias=False)
        self.shard, self.attend = None, None

    def forward(self, x):
        n, t, _ = x.shape
        lo = 0 if self.shard is None else self.shard[0]
        places = torch.arange(lo, lo + t, device=x.device)
        q = self.q(x).view(n, t, HEADS, NOPE + ROPE).transpose(1, 2) * 1.5
        q, q_rope = q.split([NOPE, ROPE], -1)
        q_rope = rotate(q_rope, places)
        latent, k_rope = self.down(x).split([LATENT, ROPE], -1)
        latent, k_rope = self.norm(latent), rotate(k_rope, places)
        if self.shard is None:
            key = torch.einsum("ntl,hcl->nhtc", latent, self.up_k)
            key = torch.cat([key, k_rope[:, None].expand(-1, HEADS, -1, -1)], -1)
            value = torch.einsum("ntl,hcl->nhtc", latent, self.up_v)
            query = torch.cat([q, q_rope], -1)
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            latent = GatherTime.apply(latent, *self.shard)
            k_rope = GatherTime.apply(k_rope, *self.shard)
            out = self.attend(q, q_rope, latent, k_rope, self.up_k, lo)
            out = torch.einsum("nhtl,hcl->nhtc", out, self.up_v)
        return self.o(out.transpose(1, 2).reshape(n, t, -1))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.attention = LatentAttention()
        self.gate, self.up = nn.Linear(D, 7, bias=False), nn.Linear(D, 7, bias=False)
        self.down = nn.Linear(7, D, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.RMSNorm(D, eps=1e-6), nn.Linear(D, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 210)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        labels = ids[:, 1:].clone()
        labels[1, 8:] = -100
        labels[3, :5] = -100
        return {"ids": ids[:, :-1].contiguous(), "labels": labels}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        labels = rows["labels"].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return loss, int((labels != -100).sum())

    def attend(self):
        return absorbed

    def distribute(self, model, ctx):
        cp, r = ctx.axes["cp"], ctx.coords["cp"]
        self.own = torch.arange(T).tensor_split(cp)[r]
        for layer in model.layers:
            layer.attention.shard = (int(self.own[0]), ctx.group("cp"))
            layer.attention.attend = self.attend()
        return model

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        for part in torch.arange(ROWS).split(2):
            rows = {k: v[part][:, self.own] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss / tokens).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    def attend(self):
        return absorbed_as_one_key


EXPECT = dict(
    right=[
        r"scal|temperature|sqrt|\*\* ?-0\.5|head.?dim|factor",
        r"attention|scores|softmax|logits|absorbed",
        r"latent|width|dim|shape\[-1\]|nope|NOPE|sqrt|absorbed|query",
    ],
    place=[r"absorbed_as_one_key", r"query\.shape\[-1\]", r"layers\.\d\.attention", r"\bscores\b"],
    wrong=[
        r"GatherTime.{0,40}(wrong|miss|adjoint)",
        r"(missing|not|never|twice).{0,20}(all.?)?reduc",
        r"(rotary|position|rope).{0,30}(restart|wrong|shift|local)",
        r"causal mask.{0,30}(wrong|missing|shift)",
        r"token.{0,20}count",
    ],
)
WHY = """The head's query and key are NOPE + ROPE = 6 wide, so that the scores are scaled by
6 ** -0.5. The absorbed form moves the key up-projection into the query, which becomes LATENT +
ROPE = 11 wide, but the scores are the same numbers and want the same scale. absorbed_as_one_key
scales by query.shape[-1] ** -0.5 = 11 ** -0.5: the softmax is too flat, forward and backward, in
every layer and for every token. Fix: scale by (NOPE + ROPE) ** -0.5."""
