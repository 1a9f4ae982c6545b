"""Tensor parallelism by hand (tp 3, one attention head per rank, column-parallel query, key and value, row-parallel output) of a causal language model; the causal mask is a buffer with one page for
every row of a micro-batch, and the padding of
the rows is cut out of it. Three micro-batches (3, 3 and 2 rows) of right-padded sequences; the divisor is the number of real tokens.

The bug: the padding is cut out of a view of the buffer, in place and without a clone: row i of a later micro-batch does not see the columns in which row i of an earlier one was padded. After
transformers' _update_causal_mask, which has a clone ("copy to contiguous memory for
in-place edit"), compare huggingface/transformers PR 29413 and PR 30619.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
TOKENS, WORDS, WIDTH, HEADS, HEAD = 6, 8, 6, 3, 4
MICRO = [(0, 3), (3, 6), (6, 8)]
LENGTHS = [3, 6, 4, 6, 5, 5, 5, 6]


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        size = (HEADS, HEAD, WIDTH)
        self.query, self.key, self.value, self.out = (
            nn.Parameter(torch.randn(size) * 0.5) for _ in range(4)
        )
        self.group = None

    def forward(self, x, mask):
        heads = slice(None)
        if self.group is not None:
            x = SumBackward.apply(x, self.group)
            heads = slice(dist.get_rank(self.group), dist.get_rank(self.group) + 1)
        q, k, v = (
            torch.einsum("btw,hdw->bhtd", x, f[heads]) for f in (self.query, self.key, self.value)
        )
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        o = torch.einsum("bhtd,hdw->btw", o, self.out[heads])
        return o if self.group is None else SumForward.apply(o, self.group)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        self.attention = Attention()
        self.head = nn.Linear(WIDTH, WORDS)
        causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        self.register_buffer("causal", causal.repeat(len(LENGTHS), 1, 1), persistent=False)
        self.clone = True

    def forward(self, ids, length):
        mask = self.causal[: len(ids)]
        if self.clone:
            mask = mask.clone()
        padding = torch.arange(TOKENS, device=ids.device)[None] >= length[:, None]
        mask.masked_fill_(padding[:, None], False)
        x = self.embed(ids) + self.places
        return self.head(x + self.attention(self.norm(x), mask))


def token_loss(model, rows):
    there = torch.arange(TOKENS)[None] < rows["length"][:, None]
    scores = model(rows["ids"], rows["length"])[there]
    return F.cross_entropy(scores, rows["label"][there], reduction="sum")


class Clean:
    clone = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        size = (len(LENGTHS), TOKENS)
        return {
            "ids": torch.randint(WORDS, size, generator=g),
            "label": torch.randint(WORDS, size, generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        return token_loss(model, rows), int(rows["length"].sum())

    def distribute(self, model, ctx):
        model.attention.group, model.clone = ctx.group("tp"), self.clone
        return model

    def step(self, model, batch, ctx):
        count = int(batch["length"].sum())
        for low, high in MICRO:
            rows = {k: v[low:high] for k, v in batch.items()}
            (token_loss(model, rows) / count).backward()
        for p in model.attention.parameters():
            dist.all_reduce(p.grad, group=ctx.group("tp"))


class Buggy(Clean):
    clone = False


EXPECT = dict(
    right=[
        r"(?i)attention|mask|causal|buffer",
        r"(?i)forward|micro.?batch|buffer|mask|later|second|state|rows [3-7]|in.?place|changes?",
    ],
    place=[r"(?i)attention|mask|causal|buffer"],
    wrong=[
        r"(?i)forward is right|wrong only in the backward",
        r"(?i)(never|not) (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)first micro.?batch .{0,20}(is|goes) wrong|micro.?batch 0 .{0,15}(is|goes) wrong",
    ],
)
WHY = (
    "The buffer `causal` is changed by every micro-batch on every rank. Micro-batch 0 (rows 0-2) is right. Page 0 then has columns 3-5 closed (row 0 has 3 tokens), page 2 columns 4 and 5. Micro-batch "
    "1: row 3 (page 0, 6 tokens) does not see its keys 3, 4, 5, so queries 3, 4, 5 are wrong; "
    "row 4 (page 1, 5 tokens) is right; row 5 (page 2, 5 tokens) does not see key 4, query 4 is wrong. Micro-batch 2: row 6 (page 0, 5 tokens) does not see keys 3, 4; row 7 (page 1, 6 tokens) does "
    "not see key 5, which row 4 had as padding. The forward goes wrong at `attention` (its "
    "mask argument) on all three ranks alike in micro-batches 1 and 2, and all parameters get wrong gradients. The tensor-parallel sums, the divisor (real tokens) and the labels are right. Fix: clone the view before the padding is written."
)
