"""Learning to rank with LambdaLoss (NDCG weights): 8 queries with 3 to 7 documents over dp (3; 3, 3
and 2 queries), micro-batches of two queries. Pairs are weighted by what a swap would change in
NDCG; the weights come from the present ranks of the documents and have no gradient.

Bug: the step takes argsort(descending) for the ranks. It lists which document is at which place,
and not at which place each document is (that is the inverse permutation, a second argsort). After
one of the commonest errors in reports on LambdaRank implementations in torch.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
QUERIES, DOCS, FEATURES = 8, 7, 5


def places(scores):
    """At which place, from 1, each document is."""
    return scores.argsort(-1, descending=True).argsort(-1) + 1


def swap_weights(scores, grades, there, places):
    scores = scores.detach().masked_fill(~there, -torch.inf)
    gain = (2.0 ** grades.to(scores.dtype) - 1) * there
    discount = 1 / torch.log2(1 + places(scores).to(scores.dtype))
    best = gain.sort(-1, descending=True).values
    ideal = (best / torch.log2(torch.arange(2, DOCS + 2).to(best))).sum(-1)
    change = (gain[:, :, None] - gain[:, None]).abs() * (discount[:, :, None] - discount[:, None])
    return change.abs() / ideal[:, None, None]


def lambda_losses(scores, grades, there, places):
    weight = swap_weights(scores, grades, there, places)
    better = grades[:, :, None] > grades[:, None]
    pairs = better & there[:, :, None] & there[:, None]
    losses = F.softplus(scores[:, None] - scores[:, :, None])
    return (losses * weight * pairs).sum((1, 2))


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = nn.Linear(4, 6), nn.Linear(FEATURES, 6)
        self.cross = nn.Bilinear(6, 6, 5)
        self.norm, self.score = nn.LayerNorm(5), nn.Linear(5, 1)

    def forward(self, query, documents):
        d = torch.tanh(self.document(documents))
        q = torch.tanh(self.query(query))[:, None].expand_as(d)
        return self.score(F.silu(self.norm(self.cross(q.contiguous(), d)))).squeeze(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 81)
        return Ranker()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 810)
        number = torch.tensor([5, 7, 3, 6, 4, 7, 5, 6])
        there = torch.arange(DOCS) < number[:, None]
        return {
            "query": torch.randn(QUERIES, 4, generator=g),
            "documents": torch.randn(QUERIES, DOCS, FEATURES, generator=g),
            "grades": torch.randint(4, (QUERIES, DOCS), generator=g) * there,
            "there": there,
        }

    def loss_sum(self, model, rows):
        scores = model(rows["query"], rows["documents"])
        losses = lambda_losses(scores, rows["grades"], rows["there"], places)
        return losses.sum(), losses.shape[0]

    def places(self, scores):
        return places(scores)

    def step(self, model, batch, ctx):
        own = torch.arange(QUERIES).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            rows = {k: v[part] for k, v in batch.items()}
            scores = model(rows["query"], rows["documents"])
            losses = lambda_losses(scores, rows["grades"], rows["there"], self.places)
            (losses.sum() / QUERIES).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def places(self, scores):
        order = torch.argsort(scores, dim=-1, descending=True)
        return order + 1


EXPECT = dict(
    right=[
        r"argsort|permutation|\border\b|sort|\bplaces?\b|ranks? of|positions?",
        r"invers|second|again|twice|double|permutation|argsort (of|for|as|gives|returns|is)|"
        r"scatter|indices|index|order instead|taken for|which document|not the (rank|place)",
        r"rank|place|discount|weight|position",
    ],
    place=[r"\bplaces\b", r"argsort", r"order \+ 1", r"swap_weights", r"\bdiscount\b"],
    wrong=[
        r"(not|never|missing|twice).{0,25}(all.?)?reduc",
        r"uneven.{0,40}(queries|rows)",
        r"padd\w+.{0,40}(counted|ranked|included|not masked)",
        r"weights?.{0,40}(carry|have|need|keep).{0,15}gradient",
        r"ideal.{0,40}(wrong|own|local)",
        r"(from|starts? at) zero|off by one",
        r"mean of (the )?means",
    ],
)
WHY = """places must give for each document its rank (1 for the best score). Buggy.places returns
argsort(descending) + 1, the list of documents in order of their rank: the inverse permutation of
what is wanted. Discounts go to the wrong documents, so the weights of the pairs and with them
dloss/dscores and all gradients are wrong; rows, masks, normaliser and reduction are right. A right
cause says that argsort is used as the rank without inverting it. Fix: a second argsort."""
