"""Context parallel attention as in the llama3 variant of ring-flash-attention: 15 tokens on three ranks, keys and values are all-gathered a few heads at a time (heads_k_stride = 1 of 3 kv heads, 6 query
heads), the backward gathers them again, adds the gradients of all keys of this head group into a buffer, block of queries after block of queries, and sums it over the ranks, of which each keeps its own tokens. Two micro-batches; parameter
gradients summed over cp.

The bug: the buffer for the gradients of keys and values is made once before the loop over the head groups and not zeroed for the next group, so that what the first group left is sent again. After the
dkv_buffer of llama3_flash_attn_varlen (zhuzilin/ring-flash-attention; its zero_() inside the loop is there for that).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCABULARY, WIDTH = 5, 15, 13, 12
HEADS, KV_HEADS, DIM = 6, 3, 2
STRIDE = 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.k, self.v = nn.Linear(WIDTH, KV_HEADS * DIM), nn.Linear(WIDTH, KV_HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x, attention):
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, DIM)) for f in (self.q, self.k, self.v))
        return x + self.out(attention(2 * q, k, v).flatten(-2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, places, attention):
        x = self.tokens(ids) + self.places(places)
        for block in self.blocks:
            x = block(x, attention)
        return self.head(x)


def dense(q, k, v):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def gather_heads(k, v, heads, group):
    """Keys and values of these heads, of all tokens: [2, rows, tokens, heads, dim]."""
    own = torch.stack([k[:, :, heads], v[:, :, heads]])
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts, 2)


def probabilities(q, k, first):
    """Causal attention of queries at first, first + 1, ... to the keys from the beginning."""
    scores = torch.einsum("bthd,bshd->bhts", q, k) / DIM**0.5
    ahead = torch.arange(k.shape[1]) > first + torch.arange(q.shape[1])[:, None]
    return scores.masked_fill(ahead, float("-inf")).softmax(-1)


def query_blocks(lo, hi):
    middle = (lo + hi) // 2
    return (lo, middle), (middle, hi)


def backward_heads(buffer, q, k, v, grad, lo, hi):
    """Adds to buffer the gradients of all keys and values, and gives that of the own queries."""
    share = q.shape[2] // k.shape[2]
    ks, vs = (x.repeat_interleave(share, 2) for x in (k, v))
    dq = torch.empty_like(q)
    for a, b in query_blocks(lo, hi):
        at = slice(a - lo, b - lo)
        p = probabilities(q[:, at], ks, a)
        dp = torch.einsum("bthd,bshd->bhts", grad[:, at], vs)
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / DIM**0.5
        dq[:, at] = torch.einsum("bhts,bshd->bthd", ds, ks)
        dk = torch.einsum("bhts,bthd->bshd", ds, q[:, at])
        dv = torch.einsum("bhts,bthd->bshd", p, grad[:, at])
        buffer += torch.stack([dk, dv]).unflatten(3, (-1, share)).sum(4)
    return dq


class HeadwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(fctx, q, k, v, lo, group):
        fctx.save_for_backward(q, k, v)
        fctx.lo, fctx.group = lo, group
        share, out = q.shape[2] // k.shape[2], torch.empty_like(q)
        for first in range(0, k.shape[2], STRIDE):
            heads = slice(first, first + STRIDE)
            mine = slice(first * share, (first + STRIDE) * share)
            ks, vs = (x.repeat_interleave(share, 2) for x in gather_heads(k, v, heads, group))
            p = probabilities(q[:, :, mine], ks, lo)
            out[:, :, mine] = torch.einsum("bhts,bshd->bthd", p, vs)
        return out

    @staticmethod
    def backward(fctx, grad):
        q, k, v = fctx.saved_tensors
        lo, hi, group = fctx.lo, fctx.lo + q.shape[1], fctx.group
        share = q.shape[2] // k.shape[2]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for first in range(0, k.shape[2], STRIDE):
            heads = slice(first, first + STRIDE)
            mine = slice(first * share, (first + STRIDE) * share)
            kv = gather_heads(k, v, heads, group)
            dkv_buffer = torch.zeros_like(kv)
            dq[:, :, mine] = backward_heads(
                dkv_buffer, q[:, :, mine], *kv, grad[:, :, mine], lo, hi
            )
            dist.all_reduce(dkv_buffer, group=group)
            dk[:, :, heads], dv[:, :, heads] = dkv_buffer[:, :, lo:hi]
        return dq, dk, dv, None, None


class StridedAttention(HeadwiseAttention):
    @staticmethod
    def backward(fctx, grad):
        q, k, v = fctx.saved_tensors
        lo, hi, group = fctx.lo, fctx.lo + q.shape[1], fctx.group
        share = q.shape[2] // k.shape[2]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dkv_buffer = k.new_zeros(2, k.shape[0], LENGTH, STRIDE, DIM)
        send_buffer = torch.empty_like(dkv_buffer)
        for first in range(0, k.shape[2], STRIDE):
            heads = slice(first, first + STRIDE)
            mine = slice(first * share, (first + STRIDE) * share)
            kv = gather_heads(k, v, heads, group)
            dq[:, :, mine] = backward_heads(
                dkv_buffer, q[:, :, mine], *kv, grad[:, :, mine], lo, hi
            )
            send_buffer.copy_(dkv_buffer)
            dist.all_reduce(send_buffer, group=group)
            dk[:, :, heads], dv[:, :, heads] = send_buffer[:, :, lo:hi]
        return dq, dk, dv, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"], torch.arange(LENGTH), dense)
        loss = F.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def attention(self, lo, group):
        return lambda q, k, v: HeadwiseAttention.apply(q, k, v, lo, group)

    def step(self, model, batch, ctx):
        own, group = LENGTH // ctx.world_size, ctx.group("cp")
        lo = ctx.coords["cp"] * own
        attention = self.attention(lo, group)
        for n in range(2):
            part = {k: x.tensor_split(2)[n][:, lo : lo + own] for k, x in batch.items()}
            logits = model(part["ids"], torch.arange(lo, lo + own), attention)
            labels = part["labels"].flatten()
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            (loss / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def attention(self, lo, group):
        return lambda q, k, v: StridedAttention.apply(q, k, v, lo, group)


EXPECT = dict(
    right=[
        r"buffer|dkv|gradients? of (the )?(keys?|k\b)|dk\b|dv\b|(key|value)s?.{0,30}gradient",
        (
            r"(not|never|without|isn't|n't) .{0,20}(zero|clear|reset|empt)|zero_|(left|still|stale|old|earlier|previous|remain|leftover|accumulat|carr|again|on top|running (sum|total)|add(s|ed)? up|cumulat)"
        ),
    ],
    place=[
        r"StridedAttention|HeadwiseAttention",
        r"dkv_buffer|send_buffer",
        r"backward_heads",
        r"head (group|chunk)|heads",
        r"backward",
    ],
    wrong=[
        r"parameters?.{0,30}(not reduced|reduced twice|never reduced)|missing (all.?)?reduc",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch|(earlier|previous|first) micro.?batch",
        r"forward .{0,20}is wrong|wrong mask|causal mask|softmax .{0,30}(wrong|own|local)|wrong group|divisor|positions? .{0,20}wrong",
    ],
)
WHY = (
    "dkv_buffer is made once per backward and backward_heads adds into it; without a zero_() for each head group the gradients of kv head 1 contain those of head 0, and those of head 2 those of 0 and 1. "
    "Keys and values of the second and third kv head get a wrong gradient on all three ranks, in every micro-batch and layer (within one call, not from earlier calls); head 0, the query gradients and the "
    "forward are right. A right cause says that the buffer of the k/v gradients is not cleared between head groups. Fix: zero the buffer at each turn."
)
