"""Knowledge graph embeddings, ComplEx with 1-to-N cross-entropy in both directions (which tail, which head), on three ranks that share the table of thirteen entities (5, 4 and 4 rows a rank); relations
are replicated, every rank sees all nine triples in two micro-batches. Entities are looked up with a masked lookup and a sum over the ranks, the scores are those of the own rows, and the softmax's
maximum, sum and target are reduced.

The bug: the ranks' query for heads is the product of relation and tail, like the tails' query is that of head and relation; it has to be the conjugate of the relation times the tail. After the class of
public reports about ComplEx's conjugate in head corruption (LibKGE, DGL-KE and PyKEEN ports: sign of the imaginary part when heads are scored in batches).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"tp": 3}}}}
ENTITIES, RELATIONS, SIZE, ROWS = 13, 4, 5, 9


def product(a, b):
    (a, i), (b, j) = a.chunk(2, -1), b.chunk(2, -1)
    return torch.cat([a * b - i * j, a * j + i * b], -1)


def conjugate(a):
    a, i = a.chunk(2, -1)
    return torch.cat([a, -i], -1)


class ComplEx(nn.Module):
    def __init__(self):
        super().__init__()
        self.entities = nn.Embedding(ENTITIES, 2 * SIZE)
        self.relations = nn.Embedding(RELATIONS, 2 * SIZE)
        self.bias = nn.Parameter(torch.randn(2, ENTITIES) * 0.3)

    def score(self, head, relation, tail):
        return (product(head, relation) * tail).sum(-1)

    def forward(self, triples):
        head, relation, tail = triples.unbind(1)
        every = self.entities.weight
        h, r, t = self.entities(head), self.relations(relation), self.entities(tail)
        tails = self.score(h[:, None], r[:, None], every) + self.bias[0]
        heads = self.score(every, r[:, None], t[:, None]) + self.bias[1]
        return tails, heads


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def lookup(table, ids, start, group):
    """Rows of a table of which this rank holds those from start on."""
    ids = ids - start
    mine = (ids >= 0) & (ids < len(table))
    return Leave.apply(table[ids.clamp(0, len(table) - 1)] * mine[:, None], group)


def cross_entropy(scores, labels, start, group):
    """Sum of the cross-entropies of rows whose scores are cut by columns."""
    top = scores.detach().amax(1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    total = Leave.apply((scores - top[:, None]).exp().sum(1), group)
    labels = labels - start
    mine = (labels >= 0) & (labels < scores.shape[1])
    hit = scores.gather(1, labels.clamp(0, scores.shape[1] - 1)[:, None])[:, 0] * mine
    return (total.log() + top - Leave.apply(hit, group)).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return ComplEx()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "triples": torch.stack(
                [torch.randint(n, (ROWS,), generator=g) for n in (ENTITIES, RELATIONS, ENTITIES)], 1
            )
        }

    def loss_sum(self, model, rows):
        triples = rows["triples"]
        tails, heads = model(triples)
        ask = nn.functional.cross_entropy
        return ask(tails, triples[:, 2], reduction="sum") + ask(
            heads, triples[:, 0], reduction="sum"
        ), len(triples)

    def shard_of(self, name, ctx):
        own = torch.arange(ENTITIES).tensor_split(ctx.world_size)[ctx.rank]
        own = slice(int(own[0]), int(own[-1]) + 1)
        return {"entities.weight": (own, slice(None)), "bias": (slice(None), own)}.get(name)

    def distribute(self, model, ctx):
        model.entities.weight = nn.Parameter(
            model.entities.weight.detach()[self.shard_of("entities.weight", ctx)].clone()
        )
        model.bias = nn.Parameter(model.bias.detach()[self.shard_of("bias", ctx)].clone())
        return model

    def ask_tails(self, head, relation):
        return product(head, relation)

    def ask_heads(self, relation, tail):
        return product(conjugate(relation), tail)

    def sharded_loss(self, model, triples, start, group):
        head, relation, tail = triples.unbind(1)
        own = model.entities.weight
        h, t = lookup(own, head, start, group), lookup(own, tail, start, group)
        r = model.relations(relation)
        tails = Enter.apply(self.ask_tails(h, r), group) @ own.t() + model.bias[0]
        heads = Enter.apply(self.ask_heads(r, t), group) @ own.t() + model.bias[1]
        return cross_entropy(tails, tail, start, group) + cross_entropy(heads, head, start, group)

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        start = self.shard_of("bias", ctx)[1].start
        for part in batch["triples"].tensor_split(2):
            (self.sharded_loss(model, part, start, ctx.group("tp")) / ROWS).backward()


class Buggy(Clean):
    def ask_heads(self, relation, tail):
        return product(relation, tail)


EXPECT = dict(
    right=[
        r"head",
        r"conjugat|sign|imaginary|complex|product|ask_heads|query",
        r"ask_heads|conjugat|quer(y|ies)|heads.? (scores|logits|direction)|scores|product",
    ],
    place=[r"ask_heads", r"\bheads\b", r"sharded_loss", r"product"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward (formula|alone)|softmax .{0,40}(own|local|not global)|lookup .{0,30}wrong|(ask_tails|tails) .{0,15}wrong",
    ],
)
WHY = (
    "The score is Re(h r conj(t)) = h . (conj(r) t), so the query that is multiplied with all entities to find the head is product(conjugate(relation), tail). Buggy.ask_heads hands back product(relation, tail), the "
    "form of the tails' query: the sign of the relation's imaginary part is wrong. It is the same on all three ranks, in every row and both micro-batches; the lookups, the tails' query and scores, the reduced softmax, "
    "the copy into the sharded product (Enter) and the divisor are right. The heads' scores and loss are wrong, and so the gradients of entities, relations and bias[1], while bias[0] is right. Fix: conjugate the relation."
)
