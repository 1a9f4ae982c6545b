"""Two towers of the same shape; gradients are packed into one flat bucket as they become ready and reduced together. After FAULTS C13-10
(Megatron-LM issue 950, the order of buckets) and PyTorch DDP's rebuilt buckets, whose order rank 0 must broadcast: ranks run the longer
tower first, to save memory, and so pack their gradients in different orders.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"search": {"axes": {"dp": 3}}}}
ROWS, LENGTH, WORDS, WIDTH, CODE = 11, 7, 23, 6, 5


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.conv, self.norm = nn.Conv1d(WIDTH, 8, 3, padding=1), nn.LayerNorm(8)
        self.out = nn.Linear(8, CODE)

    def forward(self, words):
        there = (words != 0)[..., None]
        x = F.gelu(self.conv((self.words(words) * there).mT)).mT
        return self.out(self.norm((x * there).sum(1) / there.sum(1)))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.document = Tower(), Tower()
        self.scale, self.offset = nn.Parameter(torch.tensor(1.4)), nn.Parameter(torch.tensor(-0.3))

    def forward(self, query, document, document_first=False):
        if document_first:
            d, q = self.document(document), self.query(query)
        else:
            q, d = self.query(query), self.document(document)
        return self.scale * (q * d).sum(-1) + self.offset


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return TwoTowers()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        middle = (torch.arange(ROWS) // 4 == 1)[:, None]  # rows 4 to 7 have long queries
        short, long = (
            torch.randint(a, b, (ROWS, 1), generator=g) for a, b in ((2, 5), (5, LENGTH + 1))
        )

        def words(lengths):
            ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=g)
            return ids.masked_fill(torch.arange(LENGTH) >= lengths, 0)

        return {
            "query": words(torch.where(middle, long, short)),
            "document": words(torch.where(middle, short, long)),
            "clicked": torch.rand(ROWS, generator=g) < 0.4,
        }

    @staticmethod
    def click_loss(logits, clicked):
        return F.binary_cross_entropy_with_logits(logits, clicked.to(logits.dtype), reduction="sum")

    def loss_sum(self, model, rows):
        return self.click_loss(model(rows["query"], rows["document"]), rows["clicked"]), len(
            rows["clicked"]
        )

    def distribute(self, model, ctx):
        self.ready = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(self.ready.append)
        return model

    def bucket(self, model):
        return [p for p in model.parameters() if any(p is r for r in self.ready)]

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        self.ready.clear()
        longer = (mine["document"] != 0).sum() > (mine["query"] != 0).sum()
        logits = model(mine["query"], mine["document"], document_first=bool(longer))
        (self.click_loss(logits, mine["clicked"]) / ROWS).backward()
        params = self.bucket(model)
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        for param, part in zip(params, flat.split([p.numel() for p in params])):
            param.grad.copy_(part.view_as(param))


class Buggy(Clean):
    def bucket(self, model):
        return list(self.ready)


EXPECT = dict(
    right=[
        r"query|document|tower",
        r"order|mix|other (tower|param|tensor|weight)|another|swap|permut|exchang|different (param|tensor)|belong|interchang|"
        r"in place of|of (query|document)\S* .{0,60}(query|document)|not (its|their) own|"
        r"ranks? \W?1\b.{0,80}(missing|lost|lack|other|absent|not|wrong)",
    ],
    place=[r"query|document", r"(all|every|each) ranks?|ranks? \W?[012]"],
    wrong=[
        r"forward (pass )?(is|was) (wrong|different)|forward differs",
        r"counted (twice|\d times)|reduced (twice|again)",
        r"(scale|offset) (is|are|has|have) (a )?wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
    ],
)
WHY = (
    "Rank 1 runs the query tower first and ranks 0 and 2 the document tower, so their flat buckets hold the towers in opposite order: "
    "the gradients of query.* on ranks 0 and 2 are added to those of "
    "document.* on rank 1, and the other way round. Both towers are wrong on all ranks (each misses its own part of rank 1 or of ranks "
    "0 and 2), scale and offset come first in all buckets and are right."
)
