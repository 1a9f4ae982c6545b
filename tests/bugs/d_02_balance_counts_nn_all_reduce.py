"""Data parallel MoE with a load balancing loss over the tokens of the global batch. After FAULTS
C07-07 (ltp-megatron-lm PR 68): torch.distributed.nn.all_reduce sums again in the backward.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, LENGTH, WIDTH, EXPERTS, TOP, VOCABULARY, COEFFICIENT = 10, 4, 8, 5, 2, 13, 0.2


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.GELU(), nn.Linear(6, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        weights, chosen = probs.topk(TOP, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        hot = F.one_hot(chosen, EXPERTS).to(x.dtype)
        self.sums = torch.stack([hot.flatten(0, -2).sum(0), probs.flatten(0, -2).sum(0)])
        gates = (hot * weights[..., None]).sum(-2)
        return sum(gates[..., e, None] * expert(x) for e, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.moe = nn.GRU(WIDTH, WIDTH, batch_first=True), Moe()

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = 2 * self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), torch.stack([block.moe.sums for block in self.blocks])


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {"lm": self.lm, "balance": (self.statistics, self.balance)}

    def build(self):
        torch.manual_seed(self.seed)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "ids": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
            "labels": torch.randint(VOCABULARY, (ROWS, LENGTH), generator=g),
        }

    @staticmethod
    def balance(sums, n):
        fractions, probs = sums[:, 0] / (n * LENGTH * TOP), sums[:, 1] / (n * LENGTH)
        return COEFFICIENT * EXPERTS * (fractions.detach() * probs).sum()

    def statistics(self, model, rows):
        return model(rows["ids"])[1]

    def lm(self, model, rows):
        logits, labels = model(rows["ids"])[0].flatten(0, 1), rows["labels"].flatten()
        return F.cross_entropy(logits, labels, reduction="sum"), labels.numel()

    def loss_sum(self, model, rows):
        logits, sums = model(rows["ids"])
        labels = rows["labels"].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
        return loss + labels.numel() * self.balance(sums, len(rows["ids"])), labels.numel()

    def all_reduce(self, sums):
        return SumForward.apply(sums)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.axes["dp"])[ctx.coords["dp"]] for k, v in batch.items()}
        logits, sums = model(mine["ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), mine["labels"].flatten(), reduction="sum")
        loss = loss / (ROWS * LENGTH) + self.balance(self.all_reduce(sums), ROWS)
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def all_reduce(self, sums):
        return collective.all_reduce(sums)


EXPECT = dict(
    right=[
        r"balance|auxiliary|\baux\b|term|router",
        r"three times|3 times|times 3|x ?3|3x|\b3(\.0+)?\b|too (large|big|strong|heavy)|world.?size"
        r"|number of ranks|counted|again|twice|overweight|weight|coefficient|scale|factor|backward",
    ],
    place=[r"balance", r"router", r"moe", r"all.?reduce", r"term"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"balance\S* .{0,40}(own|local) (tokens|rows|counts)",
        r"\blm\b (term )?(is|has) (wrong|scaled|too)",
        r"forward (pass )?(is wrong|differs)",
        r"rows? .{0,30}(lost|missing|dropped)",
    ],
)

WHY = (
    "torch.distributed.nn's all_reduce sums the gradients of the ranks' equal balance losses in "
    "its backward, and the gradients are summed over the ranks once more: the balance term has "
    "three times its coefficient; forward and lm term are right."
)
