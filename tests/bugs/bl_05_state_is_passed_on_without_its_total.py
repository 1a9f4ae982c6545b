"""A language model with causal linear attention (features elu + 1, normalised by the sum of the key features) is trained under context parallelism on three ranks: sequences of eight tokens are cut to three,
three and two, labels are shifted before the cut. Each rank gathers the key-value states of all chunks, sums those of the earlier ones, and goes on from there; the parameters are replicated and their
gradients summed. Five rows in micro-batches of three and two; the loss is divided by all counted tokens.

The bug: only the key-value state is passed on, and not the sum of the key features, so a token's numerator runs over all tokens before it and its denominator over those of its own chunk. After the class of
reports about sequence-parallel linear attention (flash-linear-attention, LASP, Lightning Attention), whose kernels return the state and the normaliser separately.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
WORDS, WIDTH, HEADS, LENGTH, ROWS = 11, 8, 2, 8, 5


class GatherChunks(torch.autograd.Function):
    """[ranks, ...] of what every rank hands in; on the way back each gets the sum of its slot."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g[dist.get_rank(ctx.group)], None


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return F.elu(q) + 1, F.elu(k) + 1, v

    def forward(self, x):
        q, k, v = self.heads(x)
        weights = (q @ k.transpose(-1, -2)).tril()
        y = weights @ v / weights.sum(-1, keepdim=True)
        return self.out(y.transpose(1, 2).flatten(2))


class ContextAttention(Attention):
    def __init__(self, whole, group):
        nn.Module.__init__(self)
        self.qkv, self.out, self.group = whole.qkv, whole.out, group

    def earlier(self, x):
        return GatherChunks.apply(x, self.group)[: dist.get_rank(self.group)].sum(0)

    def carry(self, k, v):
        """What the chunks before hold: the key-value state and the sum of the key features."""
        return self.earlier(k.transpose(-1, -2) @ v), self.earlier(k.sum(-2))

    def forward(self, x):
        q, k, v = self.heads(x)
        state, total = self.carry(k, v)
        weights = (q @ k.transpose(-1, -2)).tril()
        above = q @ state + weights @ v
        below = (q * total[..., None, :]).sum(-1, keepdim=True) + weights.sum(-1, keepdim=True)
        return self.out((above / below).transpose(1, 2).flatten(2))


class StateOnlyAttention(ContextAttention):
    def carry(self, k, v):
        return self.earlier(k.transpose(-1, -2) @ v), torch.zeros_like(k[..., 0, :])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    attention = ContextAttention

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        text = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=g)
        return {
            "ids": text[:, :-1],
            "labels": text[:, 1:].masked_fill(torch.rand(ROWS, LENGTH, generator=g) < 0.2, -100),
        }

    def loss_sum(self, model, rows):
        logits = model(rows["ids"])
        loss = F.cross_entropy(
            logits.flatten(0, 1), rows["labels"].flatten(), ignore_index=-100, reduction="sum"
        )
        return loss, int((rows["labels"] != -100).sum())

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.attention = self.attention(block.attention, ctx.group("cp"))
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        tokens = int((batch["labels"] != -100).sum())
        mine = {k: v.tensor_split(ctx.world_size, 1)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            loss, _ = self.loss_sum(model, {k: v.tensor_split(2)[n] for k, v in mine.items()})
            (loss / tokens).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("cp"))


class Buggy(Clean):
    attention = StateOnlyAttention


EXPECT = dict(
    right=[
        r"forward|computes|output|value|denominator|normali[sz]|total|sum of the key|carry|not (passed|exchanged|gathered)|gather",
        r"attention|carry|chunk|earlier|state|context|\bcp\b",
    ],
    place=[r"carry", r"attention", r"blocks\.0", r"earlier"],
    wrong=[
        r"gradients? .{0,30}not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own (count|number of|tokens)",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(mlp|words|head|norm) .{0,20}(computes|is) wrong in the forward|(wrong|other) (rows|labels)|rank 0.{0,30}attention.{0,30}wrong",
    ],
)
WHY = (
    "StateOnlyAttention.carry gathers and sums the key-value states of the earlier chunks but returns zeros for the sum of the key features. On ranks 1 and 2 the numerator of the linear attention runs over all "
    "earlier tokens and the denominator over those of the own chunk only, so the attention's output is too large there; rank 0, which has no earlier chunk, is right in the forward. The first wrong value is the "
    "output of blocks.0.attention on ranks 1 and 2 (words, norm and qkv are right before it). Loss and the gradients of all parameters are wrong, in both micro-batches. The gather and its backward, the sum of "
    "the gradients and the divisor are right. Fix: pass on k.sum too."
)
