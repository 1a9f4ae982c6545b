"""Learning to rank with FSDP2 on three ranks: five to six queries per rank in two micro-batches of unlike size (gradient sync with the second), five documents per query. LambdaRank: every pair of documents of a query costs softplus of
minus the difference of the scores, weighted by the change of NDCG that swapping their places would bring.

The bug: the places of the documents are taken from one argsort of the scores. That gives, for each place, the document that lies there; the place of each document is the argsort of that. So the discounts in the pair weights belong to
other documents. As in haowei01/pytorch-examples issue 3 (Something Wrong with decay_diff).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
DOCUMENTS, FEATURES, WIDTH = 5, 6, 7
PARTS = [[(0, 2), (2, 5)], [(5, 9), (9, 11)], [(11, 12), (12, 16)]]
QUERIES = 16


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.score(torch.tanh(self.second(F.silu(self.first(x)))))[..., 0]


def places_of(scores, once):
    order = scores.detach().argsort(1, descending=True)
    return order if once else order.argsort(1)


def lambda_loss(model, rows, once):
    scores, relevance = model(rows["documents"]), rows["relevance"]
    gain = (2.0**relevance - 1).to(scores.dtype)
    best = gain.sort(1, descending=True).values
    ideal = (best / torch.log2(2.0 + torch.arange(DOCUMENTS))).sum(1).clamp_min(1)
    discount = 1 / torch.log2(2.0 + places_of(scores, once).to(scores.dtype))
    swap = (gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])
    weight = swap.abs() / ideal[:, None, None] * (relevance[:, :, None] > relevance[:, None])
    return (weight * F.softplus(scores[:, None] - scores[:, :, None])).sum()


class Clean:
    once = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Scorer()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "documents": torch.randn(QUERIES, DOCUMENTS, FEATURES, generator=g),
            "relevance": torch.randint(4, (QUERIES, DOCUMENTS), generator=g),
        }

    def loss_sum(self, model, rows):
        return lambda_loss(model, rows, False), len(rows["relevance"])

    def distribute(self, model, ctx):
        fully_shard(model.second, mesh=ctx.mesh["dp"])
        return fully_shard(model, mesh=ctx.mesh["dp"])

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            (lambda_loss(model, rows, self.once) * ctx.world_size / QUERIES).backward()


class Buggy(Clean):
    once = True


EXPECT = dict(
    right=[
        r"(?i)loss|score|weight|pair|discount|rank(ing|s? of)|place",
        r"(?i)loss|weight|discount|outside the modules?|after the (modules?|forward)|"
        r"behind the model",
        r"(?i)wrong|other|mis|differ|not the|another",
    ],
    place=[r"(?i)loss|score|weight|discount|place"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|"
        r"gradient.sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]\b",
        r"(?i)forward of .?(first|second).? .{0,15}wrong|(first|second).{0,15}(goes|"
        r"is) wrong in the forward",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone|only the (first|last) micro.?batch",
        r"(?i)(a|the) (wrong|other) shard|unsharded|reduce.scatter.{0,30}wrong",
    ],
)
WHY = (
    "All modules compute the right scores on all ranks and in all micro-batches; wrong is the loss made of them: the pair weights. places_of gives the sorting order (document at each place) instead of each document's place, so the "
    "discounts in the NDCG change are those of other documents, unless the order is its own inverse (queries for which it is only a few swaps are right). Wherever the order is not its own inverse the query's loss and the gradient "
    "that goes back to its scores are wrong in size, document by document, on all three ranks and in both micro-batches, without a common factor; so are the gradients of first, second and score. The signs, pairs, gains, ideal DCG, "
    "the divisor 16, FSDP's average and the sync with the last micro-batch are right. Fix: places = order.argsort(1)."
)
