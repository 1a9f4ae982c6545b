"""A switch-style balance loss (fraction of tokens times mean probability) under data parallelism.
After Megatron/HF reports: both factors are statistics of the rank's own tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WIDTH, EXPERTS, VOCAB, BALANCE = 8, 4, 8, 4, 11, 0.5


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        """Logits of all tokens, and their routing probabilities."""
        x = self.embed(ids.flatten())
        h = self.norm(x)
        probabilities = (4 * self.router(h)).softmax(-1)
        gate, chosen = probabilities.max(-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            at = torch.nonzero(chosen == e)[:, 0]
            out = out.index_add(0, at, expert(h[at]))
        return self.head(x + gate[:, None] * out), probabilities


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"main": self.main, "balance": (self.load, self.balance)}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCAB, (ROWS, LENGTH), generator=g),
        }

    def main(self, model, rows):
        logits, labels = model(rows["ids"])[0], rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    @staticmethod
    def load(model, rows):
        """Sums over tokens: how many went to each expert, and each one's probability."""
        probabilities = model(rows["ids"])[1]
        sent = F.one_hot(probabilities.argmax(-1), EXPERTS).to(probabilities.dtype)
        return torch.cat([sent.sum(0), probabilities.sum(0)])

    @staticmethod
    def balance(load, rows):
        sent, mass = load.chunk(2)
        return BALANCE * EXPERTS * (sent * mass).sum() / (rows * LENGTH) ** 2

    def loss_sum(self, model, rows):
        loss, count = self.main(model, rows)
        return loss + count * self.balance(self.load(model, rows), len(rows["ids"])), count

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.main(model, mine)
        loss = loss / (ROWS * LENGTH) + self.rank_balance(self.load(model, mine), mine, ctx)
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)

    def rank_balance(self, load, mine, ctx):
        sent = load[:EXPERTS].detach().clone()
        dist.all_reduce(sent)
        return self.balance(torch.cat([sent, load[EXPERTS:]]), ROWS)


class Buggy(Clean):
    def rank_balance(self, load, mine, ctx):
        return self.balance(load, len(mine["ids"])) / ctx.world_size


EXPECT = dict(
    right=[
        r"balance",
        r"own (rows|tokens|statistic|sum|part|value|share|load)|local|per rank|each rank"
        r"|mean of|not global|of (the|a) rank|rank's",
    ],
    place=[r"balance", r"router"],
    wrong=[
        r"never reduced|not reduced|missing reduction",
        r"counted (twice|3 times)",
        r"\bmain\b.*wrong",
    ],
)
WHY = (
    "The balance term is the mean over ranks of a product of each rank's own statistics, not the "
    "product of the global ones; the main loss is right."
)
