"""Translated entities of a knowledge graph (TransE: head + relation close to tail, margin loss
against a corrupted tail), 13 entities in a table cut over tp (7 and 6 rows); 11 triples over
dp (6 and 5) in micro-batches of three. Vectors of entities longer than one are scaled down to
length one; in the objective this scaling is a part of the model and has its gradient.

Bug: the lookup of the ranks leaves the scaling to F.embedding(..., max_norm=1.0). That writes the
shortened rows into the table itself, outside of the graph: the gradient lacks the projection and
the factor 1 / length. After embeddings with max_norm in knowledge-graph code.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
TRIPLES, ENTITIES, RELATIONS, WIDE, MARGIN = 11, 13, 4, 6, 1.5


class Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


def at_most_one(x):
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1.0)


def shortened(numbers, table):
    return at_most_one(F.embedding(numbers, table))


def renormed(numbers, table):
    return F.embedding(numbers, table, max_norm=1.0)


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.entity = nn.Parameter(torch.randn(ENTITIES, WIDE) * 0.6)
        self.relation = nn.Parameter(torch.randn(RELATIONS, WIDE) * 0.3)

    def forward(self, numbers):
        return shortened(numbers, self.entity)


class Clean:
    rows_of = staticmethod(shortened)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 9)
        return Translation()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 90)
        triples = torch.randint(0, ENTITIES, (TRIPLES, 3), generator=g)
        relations = torch.randint(0, RELATIONS, (TRIPLES,), generator=g)
        return {"head_tail_other": triples, "relation": relations}

    def margin(self, vectors, relation):
        head, tail, other = vectors.unbind(1)
        near = (head + relation - tail).square().sum(-1)
        far = (head + relation - other).square().sum(-1)
        return F.relu(MARGIN + near - far).sum()

    def loss_sum(self, model, rows):
        relation = model.relation[rows["relation"]]
        return self.margin(model(rows["head_tail_other"]), relation), relation.shape[0]

    def distribute(self, model, ctx):
        tp, r = ctx.axes["tp"], ctx.coords["tp"]
        self.part = [-(-i * ENTITIES // tp) for i in range(tp + 1)][r : r + 2]
        a, b = self.part
        model.entity = nn.Parameter(model.entity.detach()[a:b].clone())
        return model

    def lookup(self, model, numbers, group):
        a, b = self.part
        own = (numbers >= a) & (numbers < b)
        found = numbers.new_zeros(numbers.shape)
        found[own] = numbers[own] - a
        vectors = self.rows_of(found, model.entity) * own[..., None]
        return Join.apply(vectors, group)

    def step(self, model, batch, ctx):
        own = torch.arange(TRIPLES).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for rows in own.split(3):
            vectors = self.lookup(model, batch["head_tail_other"][rows], ctx.group("tp"))
            relation = model.relation[batch["relation"][rows]]
            (self.margin(vectors, relation) / TRIPLES).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    rows_of = staticmethod(renormed)


EXPECT = dict(
    right=[
        r"max_norm|renorm|norm(ali[sz]|ed|s)?\b|length|unit|projection|clamp|scal(ed|ing) down|"
        r"shorten|at_most_one",
        r"in.?place|writ|modif|chang|overwrit|outside (of )?(the )?(graph|autograd)|no_grad|"
        r"gradient|derivative|detach|backward|differentiat|mutat|jacobian",
    ],
    place=[r"renormed", r"rows_of", r"max_norm", r"\blookup\b", r"\bentity\b"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"\bJoin\b.{0,40}(wrong|missing|adjoint)",
        r"(vocab|entit|row)\w*.{0,40}(shard|cut|slice|range).{0,20}(wrong|off|overlap)",
        r"margin.{0,30}(wrong|sign)",
        r"(micro.?batch|rank).{0,30}(mean of means|averag)",
        r"index 0.{0,40}(foreign|padding|counted)",
    ],
)
WHY = """F.embedding with max_norm renormalises the looked-up rows of the weight in place and under
no_grad, then returns plain rows. The values are those of the objective, but the gradient of
x / |x| (the factor 1 / |x| and the projection off x) is missing for each row that was longer than
one, and the parameter itself is changed by the forward. relation and the rows of short entities
are right; long rows of entity are wrong. Fix: divide by norm.clamp(min=1) within the graph."""
