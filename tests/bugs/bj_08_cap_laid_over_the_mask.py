"""A small causal language model with capped attention scores (cap * tanh(scores / cap), cap 3) on three context-parallel ranks (parts of 3, 2 and 2 of seven places); keys and values are gathered with
gradient. Rows have padding at the end, that is neither seen nor scored. Two micro-batches (3 rows and 1). Gradients are summed over the ranks; the divisor is the number of scored words.

The bug: the mask is put on the scores before the cap, so that a forbidden key has the score -3 and not minus infinity. After Gemma 2's attention soft-capping in attention code for several ranks
(flash-attention pull request 1025, huggingface/transformers pull requests on Gemma 2: the cap comes before the mask).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, WIDTH, HEADS, LENGTH, CAP = 13, 8, 2, 7, 3.0
LENGTHS = [7, 5, 6, 4]
EDGES = [0, 3, 5, 7]
PARTS = [(0, 3), (3, 4)]


class GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held, group):
        ctx.held, ctx.group = held, group
        whole = x.new_zeros(x.shape[0], LENGTH, x.shape[2])
        whole[:, held] = x
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[:, ctx.held], None, None


def capped_then_masked(scores, forbidden):
    return (CAP * torch.tanh(scores / CAP)).masked_fill(forbidden, float("-inf"))


def masked_then_capped(scores, forbidden):
    return CAP * torch.tanh(scores.masked_fill(forbidden, float("-inf")) / CAP)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.limit = capped_then_masked
        self.held, self.group = slice(0, LENGTH), None

    def forward(self, x, lengths):
        kv = self.key_value(x)
        if self.group is not None:
            kv = GatherParts.apply(kv, self.held, self.group)
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.query(x), *kv.chunk(2, -1))
        )
        places = torch.arange(LENGTH)
        later = places > places[self.held, None]
        padding = places >= lengths[:, None]
        forbidden = later[None, None] | padding[:, None, None]
        scores = self.limit(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, forbidden)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.after, self.mlp = (
            nn.LayerNorm(WIDTH),
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
        )

    def forward(self, x, lengths):
        x = x + self.attention(self.norm(x), lengths)
        return x + self.mlp(self.after(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.held = slice(0, LENGTH)

    def forward(self, rows):
        x = self.words(rows["ids"][:, self.held]) + self.places(torch.arange(LENGTH)[self.held])
        for block in self.blocks:
            x = block(x, rows["lengths"])
        labels = rows["labels"][:, self.held]
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    limit = staticmethod(capped_then_masked)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        lengths = torch.tensor(LENGTHS)
        labels = torch.randint(WORDS, (len(LENGTHS), LENGTH), generator=g)
        return {
            "ids": torch.randint(WORDS, (len(LENGTHS), LENGTH), generator=g),
            "labels": labels.masked_fill(torch.arange(LENGTH) >= lengths[:, None], -100),
            "lengths": lengths,
        }

    def loss_sum(self, model, rows):
        return model(rows), (rows["labels"] != -100).sum()

    def distribute(self, model, ctx):
        model.held = slice(EDGES[ctx.rank], EDGES[ctx.rank + 1])
        for block in model.blocks:
            block.attention.held, block.attention.group = model.held, ctx.group("cp")
            block.attention.limit = self.limit
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        count = (batch["labels"] != -100).sum()
        for low, high in PARTS:
            (model({k: v[low:high] for k, v in batch.items()}) / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    limit = staticmethod(masked_then_capped)


EXPECT = dict(
    right=[
        r"attention|limit|scores|softmax|out\b",
        r"mask|forbidden|later|padding|attend|forward|cap|input|differ|see",
    ],
    place=[r"attention|limit|scores|softmax"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"mean of (the )?means|wrong divisor|own count",
        r"(query|key_value|norm) .{0,30}first wrong|backward formula|positions? .{0,20}(wrong|restart)",
        r"only (on )?rank [0-2]\b",
    ],
)
WHY = (
    "In every attention, on all ranks and micro-batches, a forbidden key (later than the query, or padding) has the score 3 * tanh(-inf) = -3 and takes part in the softmax with e^-3; right is minus "
    "infinity and weight 0. The last place of a row without padding (row 0, place 6, on rank 2) has no forbidden key and is right in block 0; all others are wrong. Query, keys and values of block 0 are "
    "right; the first wrong value is the input of blocks.0.attention.out. No gradient flows through the masked scores but the values of forbidden keys get one. Gather, its backward, divisor 22, sum over "
    "ranks are right. Fix: cap first, then mask."
)
