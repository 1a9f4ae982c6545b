"""A language model with a shared expert and five routed experts over three expert-parallel ranks
(2, 2, 1 experts), rows over the same ranks (2, 2, 1 rows). Top-2 routing with a capacity of three
seats for each expert and row, as in GShard: all first choices are seated before any second choice,
each in the order of the tokens; who finds no seat is dropped. The ranks plan the seats with one
cumulative sum over a flattened one-hot.

Bug: the one-hot is flattened with the choices inside and the tokens outside, so that a second
choice of an early token takes the seat of a first choice of a later one. After router ports
in which (token, choice) and (choice, token) were exchanged.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"ep": 3}}}}
ROWS, T, WORDS, D, EXPERTS, HIDDEN, SEATS = 5, 7, 14, 8, 5, 6, 3


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[0], group
        full = x.new_zeros(ROWS, *x.shape[1:])
        full[lo : lo + x.shape[0]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[ctx.lo : ctx.lo + ctx.own], None, None


class Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, own, group):
        ctx.lo, ctx.own, ctx.group, ctx.shape = lo, own, group, x.shape
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x[lo : lo + own].clone()

    @staticmethod
    def backward(ctx, g):
        full = g.new_zeros(ctx.shape)
        full[ctx.lo : ctx.lo + ctx.own] = g
        dist.all_reduce(full, group=ctx.group)
        return full, None, None, None


def seats_one_by_one(chosen):
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for row in range(chosen.shape[0]):
        taken = [0] * EXPERTS
        for choice in range(chosen.shape[2]):
            for token in range(chosen.shape[1]):
                expert = int(chosen[row, token, choice])
                kept[row, token, choice] = taken[expert] < SEATS
                taken[expert] += 1
    return kept


def planned_seats(chosen):
    n, t, k = chosen.shape
    asked = F.one_hot(chosen, EXPERTS).transpose(1, 2).reshape(n, k * t, EXPERTS)
    seat = ((asked.cumsum(1) - 1) * asked).sum(-1)
    return (seat < SEATS).view(n, k, t).transpose(1, 2)


def planned_seats_flat(chosen):
    n, t, k = chosen.shape
    asked = F.one_hot(chosen, EXPERTS).reshape(n, t * k, EXPERTS)
    seat = ((asked.cumsum(1) - 1) * asked).sum(-1)
    return (seat < SEATS).view(n, t, k)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.shared_up, self.shared_down = nn.Linear(D, 5), nn.Linear(5, D)
        self.up = nn.Parameter(torch.randn(EXPERTS, D, HIDDEN) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, D) * 0.4)
        self.first, self.share, self.plan = 0, None, seats_one_by_one

    def routed(self, x, weight):
        hidden = F.gelu(torch.einsum("ntd,edh->enth", x, self.up))
        weight = weight[..., self.first : self.first + self.up.shape[0]]
        return torch.einsum("enth,ehd,nte->ntd", hidden, self.down, weight)

    def forward(self, x):
        value, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        value = value / value.sum(-1, keepdim=True) * self.plan(chosen)
        weight = (F.one_hot(chosen, EXPERTS).to(value.dtype) * value[..., None]).sum(-2)
        shared = self.shared_down(F.gelu(self.shared_up(x)))
        if self.share is None:
            return shared + self.routed(x, weight)
        lo, group = self.share
        out = self.routed(Collect.apply(x, lo, group), Collect.apply(weight, lo, group))
        return shared + Deliver.apply(out, lo, x.shape[0], group)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.mix = nn.GRU(D, D, batch_first=True)
        self.experts = Experts()

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(D, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 61)
        return Model()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 610)
        ids = torch.randint(WORDS, (ROWS, T + 1), generator=g)
        return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def loss_sum(self, model, rows):
        logits = model(rows["ids"]).flatten(0, 1)
        loss = F.cross_entropy(logits, rows["labels"].flatten(), reduction="sum")
        return loss, rows["labels"].numel()

    def plan(self):
        return planned_seats

    def distribute(self, model, ctx):
        ep, r, group = ctx.axes["ep"], ctx.coords["ep"], ctx.group("ep")
        self.own = torch.arange(ROWS).tensor_split(ep)[r]
        mine = torch.arange(EXPERTS).tensor_split(ep)[r]
        for layer in model.layers:
            experts = layer.experts
            experts.up = nn.Parameter(experts.up.detach()[mine].clone())
            experts.down = nn.Parameter(experts.down.detach()[mine].clone())
            experts.first, experts.share = int(mine[0]), (int(self.own[0]), group)
            experts.plan = self.plan()
        return model

    def step(self, model, batch, ctx):
        loss, _ = self.loss_sum(model, {k: v[self.own] for k, v in batch.items()})
        (loss / batch["labels"].numel()).backward()
        for name, p in model.named_parameters():
            if not name.endswith(("experts.up", "experts.down")):
                dist.all_reduce(p.grad, group=ctx.group("ep"))


class Buggy(Clean):
    def plan(self):
        return planned_seats_flat


EXPECT = dict(
    right=[
        r"seat|capacity|drop|kept|cumsum|cumulative|slot|overflow",
        r"order|priority|first choice|second choice|flatten|transpos|choice|token.?major|layout|"
        r"reshape|interleav|before",
        r"plan|rout|seat|expert|choice|capacity",
    ],
    place=[r"planned_seats_flat", r"\bplan\b", r"cumsum", r"reshape\(n, t \* k"],
    wrong=[
        r"(Collect|Deliver).{0,40}(wrong|miss|adjoint)",
        r"(missing|not|never|twice).{0,20}(all.?)?reduc",
        r"capacity.{0,30}(local|own|shard|too (small|large))",
        r"renormali[sz]",
        r"(off.by.one|one seat (more|less|too))",
    ],
)
WHY = """GShard seats all first choices before the second choices. planned_seats_flat takes the
cumulative sum over (token, choice) flattened as it lies, so that seats are given token by token:
an early token's second choice takes a seat from a later token's first choice. Other (token,
expert) pairs are dropped than in the model, and the layer's output and all gradients are wrong.
Fix: transpose to (choice, token) before flattening, and back after it (planned_seats)."""
