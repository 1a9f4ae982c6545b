"""A decoder with ALiBi and dropout on the attention weights, heads cut over tp (5 heads: 3 + 2),
rows over dp (2), micro-batches of two rows. Randomness is an input: each row brings a seed, from
which each layer draws the mask of all heads, so that the step can be repeated on any layout.

Bug: a tensor-parallel rank draws a mask for its own number of heads from the row's seed, so that
each rank has the numbers of the first heads. After tensor-parallel layers whose dropout starts
from one seed on all ranks and draws in the local shape.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
ROWS, T, WORDS, HEADS, WIDTH, KEEP = 7, 6, 11, 5, 2, 0.7
D = HEADS * WIDTH


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def drawn(seeds, depth, heads):
    masks = []
    for seed in seeds.tolist():
        g = torch.Generator().manual_seed(1009 * depth + int(seed))
        masks.append(torch.rand(heads, T, T, generator=g) < KEEP)
    return torch.stack(masks)


def masks_of_all_heads(seeds, depth, lo, hi):
    return drawn(seeds, depth, HEADS)[:, lo:hi]


def masks_of_own_heads(seeds, depth, lo, hi):
    return drawn(seeds, depth, hi - lo)


class Attention(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.out = nn.Linear(D, D, bias=False)
        self.bias = nn.Parameter(torch.randn(D) * 0.2)
        self.depth, self.heads, self.group, self.masks = depth, (0, HEADS), None, masks_of_all_heads

    def forward(self, x, seeds):
        lo, hi = self.heads
        if self.group is not None:
            x = Enter.apply(x, self.group)
        n = x.shape[0]
        q, k, v = (
            f(x).view(n, T, hi - lo, WIDTH).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        slopes = 2.0 ** -(torch.arange(lo, hi, dtype=x.dtype) + 1)
        far = torch.arange(T)[:, None] - torch.arange(T)
        scores = q @ k.mT * WIDTH**-0.5 - slopes[:, None, None] * far
        weights = scores.masked_fill(far < 0, float("-inf")).softmax(-1)
        weights = weights * self.masks(seeds, self.depth, lo, hi) / KEEP
        out = self.out((weights @ v).transpose(1, 2).reshape(n, T, -1))
        return (out if self.group is None else Leave.apply(out, self.group)) + self.bias

    def cut(self, lo, hi, group):
        a, b = lo * WIDTH, hi * WIDTH
        for lin in (self.q, self.k, self.v):
            lin.weight = nn.Parameter(lin.weight.detach()[a:b].clone())
            lin.bias = nn.Parameter(lin.bias.detach()[a:b].clone())
        self.out.weight = nn.Parameter(self.out.weight.detach()[:, a:b].clone())
        self.heads, self.group = (lo, hi), group


class Layer(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attention = Attention(depth)
        self.feed = nn.Sequential(nn.Linear(D, 9), nn.GELU(), nn.Linear(9, D))

    def forward(self, x, seeds):
        x = x + self.attention(self.norm1(x), seeds)
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList([Layer(0), Layer(1)])
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, WORDS)

    def forward(self, ids, seeds):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, seeds)
        return self.head(self.norm(x))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        labels = ids[:, 1:].clone()
        labels[0, 4:], labels[3, 1:] = -100, -100
        seeds = torch.randint(10**6, (ROWS,), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": labels, "seeds": seeds}

    def loss_sum(self, model, rows):
        logits, labels = model(rows["ids"], rows["seeds"]).flatten(0, 1), rows["labels"].flatten()
        loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        return loss, int((labels != -100).sum())

    def masks(self):
        return masks_of_all_heads

    def distribute(self, model, ctx):
        tp, r = ctx.axes["tp"], ctx.coords["tp"]
        heads = torch.arange(HEADS).tensor_split(tp)[r].tolist()
        for layer in model.layers:
            layer.attention.cut(heads[0], heads[-1] + 1, ctx.group("tp"))
            layer.attention.masks = self.masks()
        return model

    def step(self, model, batch, ctx):
        tokens = int((batch["labels"] != -100).sum())
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            loss, _ = self.loss_sum(model, {k: v[part] for k, v in batch.items()})
            (loss / tokens).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def masks(self):
        return masks_of_own_heads


EXPECT = dict(
    right=[
        r"mask|dropout|random|drawn|draw|seed|generator|noise",
        r"head|\btp\b|tensor|rank",
        r"own|local|first|same|slice|shape|all heads|wrong heads|other heads|offset|another",
    ],
    place=[r"masks_of_own_heads", r"\bdrawn\b", r"\bmasks\b", r"hi - lo", r"torch\.rand"],
    wrong=[
        r"(slope|alibi).{0,30}(wrong|local|own|first)",
        r"(missing|not|never|twice).{0,20}(all.?)?reduc",
        r"seeds? (of|from) (other|another|the wrong) row",
        r"KEEP|1 / ?keep|scale of (the )?dropout",
        r"causal mask.{0,30}(wrong|missing|shift)",
    ],
)
WHY = """The mask of a row and layer is torch.rand(HEADS, T, T) from the row's seed; a tp rank with
the heads lo..hi must draw for all heads and take its slice. masks_of_own_heads draws (hi - lo, T,
T) from the same seed: tp rank 0 (heads 0-2) gets its right numbers, tp rank 1 drops in heads 3
and 4 by the numbers of heads 0 and 1. The attention of rank 1 is wrong in forward and backward,
and with it everything behind it. Fix: draw for HEADS and slice lo:hi."""
