"""Causal language model with striped context parallelism (Brandon et al. 2023, "Striped attention: faster ring attention for causal transformers"): rank r holds the tokens r, r + 3, r + 6, .. of every sequence, and every rank goes through the key / value blocks of all ranks. Keys and values
are gathered with a differentiable all-gather, then used block by block.

In the stripe layout nearly every block is triangular: with diagonal where the keys' rank is not after the queries' rank, without diagonal where it is. The bug: one triangular mask for all blocks (the paper's own figure shows both; ports of zhuzilin/ring-flash-attention's stripe variant
need the extra shift by one token for the same reason).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, WIDTH, HEADS, INNER, LENGTH, ROWS, IGNORE = 19, 12, 2, 16, 12, 4, -100


class GatherBlocks(torch.autograd.Function):
    """(rows, heads, own, d) -> (cp, rows, heads, own, d)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, ctx.rank = group, dist.get_rank(group)
        blocks = x.new_zeros(dist.get_world_size(group), *x.shape)
        blocks[ctx.rank] = x
        dist.all_reduce(blocks, group=group)
        return blocks

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.rank].clone(), None


class Stripes:
    def __init__(self, ctx, mask):
        self.group, self.rank, self.size = ctx.group("cp"), ctx.rank, ctx.world_size
        self.mask = mask

    def own(self, x):
        return x[:, self.rank :: self.size]


def block_mask(n, query_rank, key_rank):
    """Query i stands at i * cp + query_rank, key j at j * cp + key_rank."""
    return torch.ones(n, n, dtype=torch.bool).tril(0 if key_rank <= query_rank else -1)


def triangle(n, query_rank, key_rank):
    return torch.ones(n, n, dtype=torch.bool).tril()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def attention(self, q, k, v, stripes):
        n = q.shape[2]
        if stripes is None:
            keys, values, masks = [k], [v], [torch.ones(n, n, dtype=torch.bool).tril()]
        else:
            keys, values = (GatherBlocks.apply(t, stripes.group) for t in (k, v))
            masks = [stripes.mask(n, stripes.rank, r) for r in range(stripes.size)]
        scale = q.shape[-1] ** -0.5
        scores = [
            (q @ key.mT * scale).masked_fill(~mask, float("-inf"))
            for key, mask in zip(keys, masks, strict=True)
        ]
        weights = torch.cat(scores, -1).softmax(-1).split(n, -1)
        return sum(w @ value for w, value in zip(weights, values, strict=True))

    def forward(self, x, stripes):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v, stripes).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.stripes = None

    def forward(self, ids, places):
        x = self.embed(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, self.stripes)
        return self.head(self.norm(x))


class Clean:
    mask = staticmethod(block_mask)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Decoder()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        labels = text[:, 1:].clone()
        labels[torch.arange(LENGTH) < torch.randint(0, 6, (ROWS, 1), generator=g)] = (
            IGNORE  # prompts
        )
        return {"ids": text[:, :-1].clone(), "labels": labels}

    @staticmethod
    def token_loss(logits, labels):
        loss = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return loss, (labels != IGNORE).sum()

    def loss_sum(self, model, rows):
        places = torch.arange(LENGTH).expand_as(rows["ids"])
        return self.token_loss(model(rows["ids"], places), rows["labels"])

    def distribute(self, model, ctx):
        model.stripes = Stripes(ctx, self.mask)
        return model

    def step(self, model, batch, ctx):
        own, group = model.stripes.own, model.stripes.group
        places = own(torch.arange(LENGTH).expand_as(batch["ids"]))
        loss, number = self.token_loss(model(own(batch["ids"]), places), own(batch["labels"]))
        dist.all_reduce(number, group=group)
        (loss / number).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    mask = staticmethod(triangle)


EXPECT = dict(
    right=[
        r"(?i)attention|mask|causal|forward|blocks?\b|softmax|keys?\b",
        r"(?i)mask|causal|future|later token|look.?ahead|triang|diagonal|sees|seen|attend|order|position|key|forward|first wrong",
    ],
    place=[r"(?i)attention|mask|causal|blocks?\.0|keys?\b|diagonal"],
    wrong=[
        r"(?i)forward (is|values? (are|is)) right|forward .{0,12}agrees",
        r"(?i)(never|not) (been )?(all.?)?reduced|missing all.?reduc|reduced (twice|again)|counted (twice|again)",
        r"(?i)wrong divisor|divi(ded|des) by (its|their) own|factor of (1/)?3\b",
        r"(?i)position embedding\S* .{0,20}(is|are) (wrong|shifted)|positions? (start|restart)s?",
        r"(?i)labels? (is|are) (shifted|wrong|taken)",
        r"(?i)backward of \S+ is wrong|wrong adjoint",
    ],
)
WHY = (
    "Query i of rank r stands at 3i + r, key j of rank s at 3j + s; for s > r the key with j = i lies in the future (s - r tokens ahead) and must be masked (tril(-1)). The bug takes the triangle with diagonal for all blocks. Rank 0's queries see the next two tokens, rank 1's the next one, rank 2's masks are right. "
    "So the forward goes wrong in the attention of blocks.0 on ranks 0 and 1; rank 2 is right there, but its blocks.1 reads the wrong keys and values of the others, so it is wrong from blocks.1 on. All parameters' gradients are wrong on all ranks (equal after the sum), in direction (seed 0: blocks.0.qkv.weight by 48 percent of its largest element, blocks.1.qkv.weight by 35, head.weight by 10). "
    "Positions, labels, the count of labelled tokens, the gather and its backward, the reductions are right. Fix: tril(0 if key_rank <= query_rank else -1)."
)
