"""Packed documents under context parallelism of three with gathered keys and values: a token attends to earlier tokens of its own document; which
document it is of is counted from the end-of-text tokens before it. After reports on packed sequences with context parallelism: the documents
are counted from the start of the own shard.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
ROWS, LENGTH, VOCAB, WIDTH, HEADS, END = 5, 15, 16, 12, 2, 0


class Gather(torch.autograd.Function):
    """Along dimension 2 forth; back, every rank's gradient of the whole is summed and cut."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        n, me = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(n, 2)[me], None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 19), nn.GELU(), nn.Linear(19, WIDTH))

    def forward(self, x, mask, gather):
        h = self.norm(x)
        q, k, v = (
            f(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, gather(k), gather(v), attn_mask=mask[:, None])
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids, places, mask, gather=lambda t: t):
        x = self.embed(ids) + self.place(places)
        for block in self.blocks:
            x = block(x, mask, gather)
        return self.head(self.norm(x))


def documents(ids):
    """0 up to the first end of text, 1 after it, ..."""
    ends = (ids == END).long()
    return ends.cumsum(1) - ends


def allowed(document_q, document_k, at_q):
    same = document_q[:, :, None] == document_k[:, None]
    return same & (torch.arange(document_k.shape[1]) <= at_q[:, None])


def token_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return LM()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(1, VOCAB, (ROWS, LENGTH + 1), generator=g)
        ids[torch.rand(ROWS, LENGTH + 1, generator=g) < 0.15] = END
        ids[:, 3] = END
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss_sum(self, model, rows):
        document, at = documents(rows["ids"]), torch.arange(LENGTH)
        logits = model(rows["ids"], at, allowed(document, document, at))
        return token_loss(logits, rows["labels"]), rows["labels"].numel()

    def own_documents(self, ids, group):
        """Those of the own shard, counted over the shards before it."""
        n, me = dist.get_world_size(group), dist.get_rank(group)
        ends = (ids == END).sum(1)
        every = [torch.empty_like(ends) for _ in range(n)]
        dist.all_gather(every, ends, group=group)
        return documents(ids) + sum(every[:me], torch.zeros_like(ends))[:, None]

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["cp"], ctx.coords["cp"], ctx.group("cp")
        own = torch.arange(LENGTH).chunk(n)[me]
        for rows in torch.arange(ROWS).tensor_split(2):
            ids, labels = (batch[name][rows][:, own].contiguous() for name in ("ids", "labels"))
            document = self.own_documents(ids, group)
            every = [torch.empty_like(document) for _ in range(n)]
            dist.all_gather(every, document, group=group)
            mask = allowed(document, torch.cat(every, 1), own)
            logits = model(ids, own, mask, lambda t: Gather.apply(t, group))
            (token_loss(logits, labels) / batch["labels"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def own_documents(self, ids, group):
        return documents(ids)


EXPECT = dict(
    right=[
        r"forward|activation|goes into|what goes in|input|output",
        r"blocks\.0\.(o|v|k)|attention|mask|between|scaled_dot",
        r"positions?|tokens?|ranks? .{0,10}[012]|rank 0",
    ],
    place=[r"blocks\.0\b"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}goes wrong in blocks\.0\.(q|k|v)\b",
        r"(own|local) (count|denominator|divisor)|mean of (the )?means",
        r"blocks\.0\.o\S* .{0,30}wrong on (all|every) ranks?|wrong on rank 0",
    ],
)
WHY = (
    "The index of the document is counted from the start of the own shard and restarts at 0 on ranks 1 and 2, so their queries take tokens of other "
    "documents on earlier shards for their own (and miss the right ones, which have another number). Rank 0's mask and activations are right in "
    "both blocks (it looks at nothing later); q, k and v of blocks.0 are right everywhere, what goes into blocks.0.o is wrong on ranks 1 and 2. All gradients are wrong "
    "after the reduction. Divisor and reductions are right."
)
