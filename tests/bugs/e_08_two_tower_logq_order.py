"""A two-tower recommender with in-batch negatives of all ranks and the logQ correction for popular items.
After lightonai/pylate PR 156 and huggingface/sentence-transformers PR 3442 (gathering across devices puts the own rows first):
the items are gathered own rows first, their sampling probabilities in the order of ranks.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collective
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"towers": {"axes": {"dp": 3}}}}
ROWS, USERS, ITEMS, WIDTH, HISTORY = 11, 15, 23, 6, 4


class Tower(nn.Module):
    def __init__(self, entries):
        super().__init__()
        self.table = nn.EmbeddingBag(entries, 7, mode="sum")
        self.layers = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, WIDTH))

    def forward(self, ids):
        return F.normalize(self.layers(self.table(ids)), dim=-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return nn.ModuleDict({"user": Tower(USERS), "item": Tower(ITEMS)})

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "history": torch.randint(USERS, (ROWS, HISTORY), generator=g),
            "item": torch.randint(ITEMS, (ROWS, 2), generator=g),
            "log_q": -3 + torch.randn(ROWS, generator=g),
        }

    @staticmethod
    def loss_of(users, items, log_q):
        """The first len(users) items are the users' own."""
        logits = 4 * users @ items.T - log_q
        return F.cross_entropy(logits, torch.arange(len(users)), reduction="sum")

    def loss_sum(self, model, rows):
        users, items = model["user"](rows["history"]), model["item"](rows["item"])
        return self.loss_of(users, items, rows["log_q"]), len(users)

    @staticmethod
    def own_first(parts, rank):
        return torch.cat([parts[rank], *parts[:rank], *parts[rank + 1 :]])

    def gather_log_q(self, parts, rank):
        return self.own_first(parts, rank)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        sizes = [torch.empty(1, dtype=torch.long) for _ in range(ctx.world_size)]
        dist.all_gather(sizes, torch.tensor([len(mine["item"])]))
        most = int(max(sizes))

        def gather(x, collect):
            padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
            return [part[:n] for part, n in zip(collect(padded), sizes, strict=True)]

        def plainly(x):
            parts = [torch.empty_like(x) for _ in sizes]
            dist.all_gather(parts, x)
            return parts

        users, items = model["user"](mine["history"]), model["item"](mine["item"])
        everything = self.own_first(gather(items, collective.all_gather), ctx.rank)
        log_q = self.gather_log_q(gather(mine["log_q"], plainly), ctx.rank)
        (self.loss_of(users, everything, log_q) / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def gather_log_q(self, parts, rank):
        return torch.cat(parts)


EXPECT = dict(
    right=[
        r"order|permut|misalign|mismatch|shift|offset|position|other (rank|row|item)|wrong (rank|row|item|entr|weight|probab)|forward|logit|"
        r"swapp?ed|belongs? to|rows",
        r"rank|item|log_?q|correction|probab|negativ|rows|gather",
    ],
    place=[r"ranks? \W?(1|2)", r"log_?q|correction", r"item|user|table", r"gather", r"rows"],
    wrong=[
        r"rank 0('s rows)? (is|are) wrong",
        r"(not|never) (all.?)?(reduced|summed|averaged)",
        r"(reduced|counted|divided) (twice|again)",
        r"(without|no|lost|detached) gradient",
        r"mean of (the )?means",
    ],
)
WHY = (
    "On ranks 1 and 2 the items come own rows first but log_q comes in the order of ranks, so each logit is corrected with another "
    "item's probability: the loss of the rows of ranks 1 and 2 is wrong, and after the sum all parameters of both towers. On rank 0 "
    "both orders are the same."
)
