"""Top-1 MoE routing balanced by Sinkhorn iterations, tokens of a sequence spread over ranks. After
FAULTS C18-07 (Megatron-LM issue 1740): Sinkhorn normalises over the tokens of the shard.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}

ROWS, LENGTH, WIDTH, EXPERTS, VOCABULARY = 8, 6, 8, 4, 11


def sinkhorn(logits, iterations=12):
    """Of (rows, tokens, experts): scaled so that tokens and experts are about evenly used."""
    cost = logits.exp()
    tokens = torch.ones_like(cost[..., :1])
    for _ in range(iterations):
        experts = 1 / (cost.shape[-1] * (tokens * cost).sum(-2, keepdim=True))
        tokens = 1 / (cost.shape[-2] * (experts * cost).sum(-1, keepdim=True))
    return tokens * cost * experts


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, parallel):
        q, kv = self.q(x), self.kv(x)
        first = 0
        if parallel is not None:
            kv, first = parallel.gather_with_grad(kv), parallel.first
        k, v = kv.chunk(2, dim=-1)
        causal = torch.arange(k.shape[1]) <= first + torch.arange(q.shape[1])[:, None]
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=causal))


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x, parallel):
        logits = 2 * self.router(x)
        with torch.no_grad():
            balanced = sinkhorn(logits) if parallel is None else parallel.balanced(logits)
            chosen = F.one_hot(balanced.argmax(-1), EXPERTS).to(x.dtype)
        gates = logits.sigmoid() * chosen
        return sum(gates[..., e, None] * expert(x) for e, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.moe = nn.LayerNorm(WIDTH), Moe()

    def forward(self, x, parallel):
        x = x + self.attn(self.norm1(x), parallel)
        return x + self.moe(self.norm2(x), parallel)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids, parallel=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, parallel)
        return self.head(self.norm(x))


class ContextParallel:
    def __init__(self, group, rank, size, balanced):
        self.group, self.rank, self.size = group, rank, size
        self.first = rank * (LENGTH // size)
        self.balanced = lambda logits: balanced(self, logits)

    def gather_with_grad(self, x):
        return torch.cat(collective.all_gather(x.contiguous(), self.group), dim=1)

    def gather(self, x):
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    def loss_sum(self, model, rows, parallel=None):
        logits, labels = model(rows["ids"], parallel).flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    @staticmethod
    def balanced(parallel, logits):
        whole = sinkhorn(parallel.gather(logits))
        return whole.chunk(parallel.size, dim=1)[parallel.rank]

    def step(self, model, batch, ctx):
        size, rank = ctx.axes["cp"], ctx.coords["cp"]
        parallel = ContextParallel(ctx.group("cp"), rank, size, self.balanced)
        mine = {k: v.chunk(size, dim=1)[rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine, parallel)
        (loss / (ROWS * LENGTH)).backward()
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            dist.all_reduce(param.grad, group=ctx.group("cp"))


class Buggy(Clean):
    @staticmethod
    def balanced(parallel, logits):
        return sinkhorn(logits)


EXPECT = dict(
    right=[
        r"forward|output|activation|rout(ing|ed|er|es)|chosen|sinkhorn|own tokens|local",
        r"layers\.0\.moe|layers\.0|\bmoe\b|router",
    ],
    place=[r"layers\.0\.moe", r"\bmoe\b", r"layers\.0\b"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"counted (twice|two times|2 times)|reduced (twice|again)",
        r"averag|mean of (the )?means",
        r"attn\S* (is the first|is first wrong|is wrong first)",
        r"balance (loss|term)",
        r"positions? (are|is) wrong|position ids",
    ],
)

WHY = (
    "Each rank balances the routing over its own tokens and not over the sequence, so tokens go to "
    "other experts: the output of layers.0.moe is wrong with a right input."
)
