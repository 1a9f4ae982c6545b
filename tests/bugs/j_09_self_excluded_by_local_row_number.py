"""Supervised contrastive learning with embeddings gathered (with gradient) over three ranks. After HobbitLong/SupContrast's loss (the
self-contrast mask scatters arange(batch)) and its multi-GPU ports, reported in several issues: the rows of the similarity matrix are the
rank's own, the columns everybody's, and the mask has no offset.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"vision": {"axes": {"dp": 3}}}}
ROWS, SIDE, CLASSES, WIDTH, TEMPERATURE = 13, 5, 3, 6, 0.4


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, start):
        ctx.span = start, start + len(x)
        whole = x.new_zeros(ROWS, x.size(1))
        whole[slice(*ctx.span)] = x
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[slice(*ctx.span)], None


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.project = nn.Sequential(nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, WIDTH))

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return F.normalize(self.project(x), dim=1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Projector()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        labels = torch.randint(CLASSES, (ROWS,), generator=g)
        x = torch.randn(ROWS, 2, SIDE, SIDE, generator=g) + labels[:, None, None, None] - 1
        return {"x": x, "label": labels, "id": torch.arange(ROWS)}

    @staticmethod
    def contrast(anchors, labels, own, everyone, all_labels):
        similar = anchors @ everyone.mT / TEMPERATURE
        others = torch.ones_like(similar, dtype=torch.bool).scatter(1, own[:, None], False)
        log_total = similar.masked_fill(~others, float("-inf")).logsumexp(1, keepdim=True)
        positive = (labels[:, None] == all_labels) & others
        each = ((log_total - similar) * positive).sum(1) / positive.sum(1).clamp(min=1)
        return each.sum()

    def loss_sum(self, model, rows):
        x = self.batch()["x"].to(rows["x"].dtype)
        loss = self.contrast(
            model(rows["x"]), rows["label"], rows["id"], model(x), self.batch()["label"]
        )
        return loss, len(rows["x"])

    def own_columns(self, anchors, start):
        return torch.arange(len(anchors)) + start

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        anchors, start = model(mine["x"]), int(mine["id"][0])
        own = self.own_columns(anchors, start)
        everyone = GatherRows.apply(anchors, start)
        loss = self.contrast(anchors, mine["label"], own, everyone, batch["label"])
        (loss / ROWS).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)


class Buggy(Clean):
    def own_columns(self, anchors, start):
        return torch.arange(len(anchors))


EXPECT = dict(
    right=[
        r"loss|gradient (at|of|into|entering) the (output|embedding|project)|project|contrast|similar|mask|index|offset|rows?",
        r"rank|rows?|offset|index|mask|loss|own|local|enter|backward|shard",
    ],
    place=[r"ranks? \W?[12]", r"loss", r"rows?", r"(all|every|each) (rank|parameter)s?"],
    wrong=[
        r"never (been )?(all.?)?reduced|is not reduced|missing (all.?)?reduc",
        r"reduced (twice|again)|counted (twice|\d times)",
        r"(output|forward) of (the )?(conv|norm|project)\S* (is|was) wrong|forward (pass )?(is|was) wrong",
        r"mean of (the )?(rank |ranks' )?means",
        r"no gradient through the gather|gather\w* without (its )?gradient|detach",
        r"rows? of rank \W?0 (is|are) wrong",
    ],
)
WHY = (
    "On ranks 1 and 2 the mask that takes the anchor itself out of positives and denominator removes columns 0-3, rows of rank 0, "
    "instead of the anchor: the loss of their rows is wrong, rank 0's is right. The embeddings are right; all gradients are wrong on "
    "all ranks."
)
