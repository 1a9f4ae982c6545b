"""CLIP-like contrastive training with gradient caching: features of all micro-batches first, the loss on the gathered features of all
ranks, then each micro-batch again with its cached gradient. After open_clip's `labels = arange(n) + n * rank` in the local loss with an
uneven last batch.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, PIXELS, WORDS, LENGTH, WIDTH, MICRO = 10, 9, 14, 4, 8, 2


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Linear(PIXELS, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, WIDTH)
        )
        self.words = nn.Embedding(WORDS, WIDTH)
        self.text = nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU(), nn.Linear(10, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(1.3))

    def encode(self, rows):
        image = F.normalize(self.image(rows["image"]), dim=-1)
        text = F.normalize(self.text(self.words(rows["text"])).mean(1), dim=-1)
        return torch.stack([image, text], 1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Clip()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, PIXELS, generator=g),
            "text": torch.randint(WORDS, (ROWS, LENGTH), generator=g),
        }

    def pair_loss(self, model, own, everything, labels):
        """The loss of the own rows in both directions against the features of all rows."""
        scale = model.logit_scale.exp()
        a = scale * own[:, 0] @ everything[:, 1].T
        b = scale * own[:, 1] @ everything[:, 0].T
        return (
            F.cross_entropy(a, labels, reduction="sum")
            + F.cross_entropy(b, labels, reduction="sum")
        ) / 2

    def loss_sum(self, model, rows):
        features = model.encode(rows)
        n = len(features)
        return self.pair_loss(model, features, features, torch.arange(n)), n

    def first_label(self, rank, counts):
        return sum(counts[:rank])

    def step(self, model, batch, ctx):
        rank, group = ctx.coords["dp"], ctx.group("dp")
        counts = [len(t) for t in torch.arange(ROWS).tensor_split(ctx.axes["dp"])]
        mine = {k: v.tensor_split(ctx.axes["dp"])[rank] for k, v in batch.items()}
        micro = [{k: v.tensor_split(MICRO)[m] for k, v in mine.items()} for m in range(MICRO)]
        with torch.no_grad():
            own = torch.cat([model.encode(rows) for rows in micro])
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=group)
        everything = torch.cat([g[:n] for g, n in zip(gathered, counts, strict=True)])
        everything.requires_grad_()
        start = sum(counts[:rank])
        local = everything[start : start + counts[rank]]
        labels = torch.arange(counts[rank]) + self.first_label(rank, counts)
        (self.pair_loss(model, local, everything, labels) / ROWS).backward()
        cached = everything.grad
        dist.all_reduce(cached, group=group)
        cached = cached[start : start + counts[rank]].tensor_split(MICRO)
        for rows, grad in zip(micro, cached, strict=True):
            model.encode(rows).backward(grad)
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def first_label(self, rank, counts):
        return rank * counts[rank]


EXPECT = dict(
    right=[
        r"loss|label|target|logit|positive|pair|diagonal|offset",
        r"ranks? .{0,12}[12]|label|target|offset|start|uneven|pair|positive|rows?|coupl|contrast|logit_scale|loss",
    ],
    place=[
        r"ranks? .{0,12}[12]",
        r"loss|label|target|pair|logit",
        r"(all|every|each) (rank|param)",
    ],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed) (twice|again|\d times)",
        r"mean of (the )?means|own (count|denominator|divisor)",
        r"gather.{0,40}(no gradient|detach|cuts|drops)",
        r"ranks? 0.{0,15}(is|has) wrong",
    ],
)
WHY = (
    "The first label of a rank is its rank times its own number of rows. With 4, 3 and 3 rows rank 1 starts at 3 and not at 4, rank 2 at 6 "
    "and not at 7: on these ranks each image is pulled to the text of the row before. Rank 0's loss is right; all parameters get wrong "
    "gradients through the loss (labels) of ranks 1 and 2."
)
