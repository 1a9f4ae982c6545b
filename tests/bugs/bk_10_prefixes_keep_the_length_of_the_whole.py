"""Sentence embeddings trained the Matryoshka way under FSDP2 on three ranks (3, 3 and 2 of eight pairs; two micro-batches a rank, gradients synchronised after the second): for each of the widths 3, 5
and 8 the first features of both sentences are scaled to length one, and the squared distance of their cosine and the gold score is added. FSDP averages, so the loss is multiplied by the number of
ranks and divided by the eight pairs.

The bug: the embeddings are scaled to length one once, as a whole, and the prefixes are cut from that, so that their products are no cosines. After sentence-transformers' MatryoshkaLoss (truncate,
then normalise) and issues about models whose last module is Normalize before the truncation.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
WORDS, WIDTH, OUT, LENGTH, ROWS = 14, 7, 8, 5, 8
WIDTHS = [3, 5, 8]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, ids):
        x = self.words(ids)
        x = x + torch.tanh(self.mixer(x.roll(1, 1)))
        return self.out(x.mean(1))


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = Tower()
        self.cut_first = True

    def prefixes(self, x):
        if self.cut_first:
            return [F.normalize(x[:, :width], dim=-1) for width in WIDTHS]
        x = F.normalize(x, dim=-1)
        return [x[:, :width] for width in WIDTHS]

    def forward(self, left, right, gold):
        both = self.tower(torch.cat([left, right]))
        total = 0.0
        for prefix in self.prefixes(both):
            a, b = prefix.chunk(2)
            total = total + ((a * b).sum(-1) - gold).square().sum()
        return total


class Clean:
    cut_first = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pairs()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "left": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "right": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
            "gold": torch.rand(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        return model(rows["left"], rows["right"], rows["gold"]), len(rows["gold"])

    def distribute(self, model, ctx):
        model.cut_first = self.cut_first
        fully_shard(model.tower.mixer, mesh=ctx.mesh)
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for n in range(2):
            model.set_requires_gradient_sync(n == 1)
            part = {k: v.tensor_split(2)[n] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, part)
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    cut_first = False


EXPECT = dict(
    right=[
        r"normali[sz]|prefix|length|cosine|width|slice|cut|scale|scal",
        r"forward|prefix|normali[sz]|loss|order|pairs|whole|width|outside|after the (tower|out)",
    ],
    place=[r"prefix", r"normali[sz]e", r"pairs", r"\bloss\b", r"tower"],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)|only the last micro.?batch",
        r"backward formula|(tower|mixer|words|tower\.out) .{0,20}(computes|is) wrong in the forward|(wrong|other) rows",
    ],
)
WHY = (
    "Pairs.prefixes scales the whole embedding of eight features to length one and cuts the first 3, 5 and 8 features from it; the prefixes of 3 and 5 features are shorter than one, so their products are "
    "no cosines but smaller by the product of two lengths. The term of width 8 is right. The tower's output is right on all ranks; the loss and the gradient that goes into the tower's output are wrong in "
    "every pair, on all three ranks, in both micro-batches, and so all parameters' gradients. FSDP's shards, the synchronisation after the second micro-batch, and the factor 3 / 8 are right. Fix: cut "
    "first, then scale each prefix to length one."
)
