"""Supervised contrastive training of image features on three data parallel ranks (4, 4 and 3 of eleven images, two crops of each): every crop is an anchor on its own rank and meets the crops of all
ranks, which are gathered with a backward that brings the gradients home. The loss of an anchor is the mean, over the other crops of its class, of minus the log softmax over all other crops. The
gradients of the ranks are summed in one flat message.

The bug: the number of crops of an anchor's class, by which its sum of log-probabilities is divided, is counted on the rank's own crops, while the sum goes over the crops of all ranks. After reports
about SupCon ports in which the mask was made before the features were gathered, and only half of it was put right afterwards.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, CLASSES, PIXELS, WIDTH, OUT = 11, 3, 6, 9, 5
TEMPERATURE = 0.4


class Projector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(PIXELS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, crops):
        return F.normalize(self.out(self.body(crops)), dim=-1)


class Gather(torch.autograd.Function):
    """Rows of all ranks, also where their numbers differ; the gradients are summed at home."""

    @staticmethod
    def forward(ctx, rows, counts, rank, group):
        ctx.counts, ctx.rank, ctx.group = counts, rank, group
        widest = max(counts)
        padded = rows.new_zeros(widest, *rows.shape[1:])
        padded[: len(rows)] = rows
        out = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(out, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(out, counts)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.split(ctx.counts)[ctx.rank], None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Projector()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "crops": torch.randn(ROWS, 2, PIXELS, generator=g),
            "label": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        batch = self.batch()
        features = model(batch["crops"].flatten(0, 1))
        labels = batch["label"].repeat_interleave(2)
        others = ~torch.eye(2 * ROWS, dtype=torch.bool)
        friends = (labels[:, None] == labels) & others
        log_probs = (features @ features.T / TEMPERATURE).masked_fill(~others, -1e9).log_softmax(-1)
        losses = -(log_probs * friends).sum(-1) / friends.sum(-1)
        return losses.view(ROWS, 2)[rows].sum(), len(rows)

    def friends_of(self, labels, everyone, first):
        """Which gathered crops are of an own crop's class, without the crop itself."""
        friends = labels[:, None] == everyone
        friends[torch.arange(len(labels)), first + torch.arange(len(labels))] = False
        return friends

    def number_of_friends(self, labels, friends):
        return friends.sum(-1)

    def loss_of_anchors(self, features, labels, counts, ctx):
        group, first = ctx.group("dp"), sum(counts[: ctx.rank])
        keys = Gather.apply(features, counts, ctx.rank, group)
        everyone = Gather.apply(labels, counts, ctx.rank, group)
        logits = features @ keys.T / TEMPERATURE
        itself = torch.zeros_like(logits, dtype=torch.bool)
        itself[torch.arange(len(labels)), first + torch.arange(len(labels))] = True
        log_probs = logits.masked_fill(itself, -1e9).log_softmax(-1)
        friends = self.friends_of(labels, everyone, first)
        return -((log_probs * friends).sum(-1) / self.number_of_friends(labels, friends)).sum()

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        crops = batch["crops"].tensor_split(ctx.world_size)
        counts = [2 * len(part) for part in crops]
        labels = batch["label"].tensor_split(ctx.world_size)[ctx.rank].repeat_interleave(2)
        features = model(crops[ctx.rank].flatten(0, 1))
        (self.loss_of_anchors(features, labels, counts, ctx) / ROWS).backward()
        parameters = list(model.parameters())
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for p, grad in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = grad.view_as(p)


class Buggy(Clean):
    def number_of_friends(self, labels, friends):
        return (labels[:, None] == labels).sum(-1) - 1


EXPECT = dict(
    right=[
        r"number_of_friends|positives|friends|same class|labels?|count|divisor|divid|normali[sz]|denominator|weight(s|ed) .{0,30}(row|anchor)|per.?(row|anchor)",
        r"own|local|rank|divisor|divid|normali[sz]|count|too (large|big)|factor|scale|weight",
    ],
    place=[
        r"number_of_friends",
        r"friends",
        r"positives",
        r"loss_of_anchors",
        r"\bloss\b",
        r"labels?",
    ],
    wrong=[
        r"not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"gather.{0,40}(without (a )?grad|detach|backward .{0,20}(missing|wrong))",
        r"softmax .{0,40}(own|local) (rows|keys|crops)|negatives .{0,30}(missing|own rank)",
        r"(body|out|projector) .{0,20}(computes|is) wrong|backward formula",
    ],
)
WHY = (
    "Buggy.number_of_friends counts the other crops of an anchor's class among the rank's own crops; the sum of log-probabilities that it divides goes over the crops of this class on all three ranks. Each anchor's loss and "
    "the gradient it gives are too large by the ratio of the two numbers, another one for every class and rank. Features, gathered keys, labels and the log softmax are right on all ranks; the gather's backward, the flat "
    "sum over the ranks and the divisor 11 are right as well. All parameters' gradients are wrong. Fix: count the friends in the mask over the gathered crops."
)
