"""Sequence-level policy optimisation (GSPO): the importance ratio of an answer is the exponential of the mean log-ratio over its tokens, clipped;
two-way context parallelism in two-way data parallelism. After reports on sequence ratios under context parallelism: the sum over the
tokens is reduced over the ranks that share the answer, its length is not.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}
ROWS, LENGTH, VOCAB, WIDTH = 7, 10, 15, 11


class Sum(torch.autograd.Function):
    """Every rank goes on with the same loss: the gradient passes as it is."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Policy(nn.Module):
    """Tokens see the three before them: the ids come with their own past, no exchange is needed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.past = nn.Conv1d(WIDTH, 17, 3)
        self.norm = nn.LayerNorm(17)
        self.mlp = nn.Sequential(nn.Linear(17, 20), nn.GELU(), nn.Linear(20, 17))
        self.head = nn.Linear(17, VOCAB)

    def forward(self, ids):
        x = self.past(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.mlp(self.norm(x)))


def log_probs(model, ids, targets):
    return model(ids).log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def objective(ratio, advantage):
    return -torch.minimum(ratio * advantage, ratio.clamp(0.7, 1.4) * advantage).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Policy()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(VOCAB, (ROWS, LENGTH + 3), generator=g)
        start = torch.tensor([0, 3, 1, 6, 2, 4, 0])[:, None]
        end = torch.tensor([10, 9, 4, 10, 8, 7, 6])[:, None]
        at = torch.arange(LENGTH)
        with torch.no_grad():
            old = log_probs(self.build(), ids[:, :-1], ids[:, 3:])
        return {
            "ids": ids[:, :-1],
            "targets": ids[:, 3:],
            "mask": (at >= start) & (at < end),
            "old": old + 0.3 * torch.randn(ROWS, LENGTH, generator=g),
            "advantage": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        difference = log_probs(model, rows["ids"], rows["targets"]) - rows["old"]
        mean = (difference * rows["mask"]).sum(1) / rows["mask"].sum(1)
        return objective(mean.exp(), rows["advantage"]), len(rows["ids"])

    def lengths(self, mask, group):
        n = mask.sum(1)
        dist.all_reduce(n, group=group)
        return n

    def step(self, model, batch, ctx):
        cp, group = ctx.coords["cp"], ctx.group("cp")
        half = LENGTH // ctx.axes["cp"]
        own = slice(cp * half, (cp + 1) * half)
        rows = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for at in rows.tensor_split(2):
            b = {k: v[at] for k, v in batch.items()}
            ids, targets, mask = (
                b["ids"][:, own.start : own.stop + 2],
                b["targets"][:, own],
                b["mask"][:, own],
            )
            difference = log_probs(model, ids, targets) - b["old"][:, own]
            total = Sum.apply((difference * mask).sum(1), group)
            ratio = (total / self.lengths(mask, group)).exp()
            (objective(ratio, b["advantage"]) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "cp"))


class Buggy(Clean):
    def lengths(self, mask, group):
        return mask.sum(1).clamp(min=1)


EXPECT = dict(
    right=[
        r"loss|ratio|head|gradient that reaches|objective|log",
        r"loss|row|ratio|weight|divid|length|count|coupl|differ|gradient that reaches|another gradient",
    ],
    place=[r"loss|head|ratio|objective|after the last module|(all|every|each) (rank|param)"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,40}(goes|is) wrong in (embed|past|norm|mlp|head)",
        r"every rank divides .{0,20}(loss|by its own (count|number) of rows)",
        r"targets? (is|are|of) .{0,15}(shifted|other)",
    ],
)
WHY = (
    "The sum of an answer's log-ratios is that over both context ranks, but it is divided by the number of the answer's tokens in the own half only. The "
    "mean log-ratio and with it the ratio and its clip are wrong, by another amount on each rank and row, and so is the weight of each token: the "
    "rows whose answer lies in one half alone are right on that rank. All parameters are wrong; the model's forward, the number of rows and "
    "the reductions over dp and cp are right."
)
