"""A two-tower recommender whose candidate items (sampled negatives, a list for each row, padded)
are split by columns over 3 ranks; the sampled softmax is taken over all ranks.

The bug: candidates that equal the row's positive item and padded candidates are to be dropped
from the softmax. The condition is written `cand == positive | ~valid`; `|` binds tighter than
`==` in Python, so it compares with `positive | ~valid`, and padded slots stay in the softmax as
negatives (of item 0). After the precedence slips of masks (`a == b & c`) that linters and pull
requests on recommender losses report; accidental hits as in tensorflow/recommenders
RemoveAccidentalHits.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cand": 3}}}}
ITEMS, USERS, SLOTS = 23, 9, 10


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, 7)
        self.item = nn.Embedding(ITEMS, 7)
        self.user_mlp = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 5))
        self.item_mlp = nn.Sequential(nn.Linear(7, 5), nn.Tanh())
        self.log_scale = nn.Parameter(torch.tensor(0.4))

    def scores(self, users, items):
        u = self.user_mlp(self.user(users))
        v = self.item_mlp(self.item(items))
        return (u.unsqueeze(1) * v).sum(-1) * self.log_scale.exp()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 21)
        return Towers()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 22)
        user = torch.randint(0, USERS, (7,), generator=g)
        positive = torch.randint(1, ITEMS, (7,), generator=g)
        cand = torch.randint(1, ITEMS, (7, SLOTS), generator=g)
        number = torch.tensor([10, 5, 8, 3, 9, 6, 4])
        valid = torch.arange(SLOTS) < number.unsqueeze(1)
        cand[:, 1] = torch.where(torch.arange(7) % 3 == 0, positive, cand[:, 1])
        return {"user": user, "positive": positive, "cand": cand * valid, "valid": valid}

    def loss_sum(self, model, rows):
        hit = rows["cand"] == rows["positive"].unsqueeze(1)
        negative = model.scores(rows["user"], rows["cand"]).masked_fill(
            hit | ~rows["valid"], float("-inf")
        )
        positive = model.scores(rows["user"], rows["positive"].unsqueeze(1))
        both = torch.cat([positive, negative], dim=1)
        return (both.logsumexp(1) - positive.squeeze(1)).sum(), len(both)

    def dropped(self, cand, valid, positive):
        return (cand == positive.unsqueeze(1)) | ~valid

    def columns(self, ctx):
        rank = ctx.rank
        return rank * SLOTS // ctx.world_size, (rank + 1) * SLOTS // ctx.world_size

    def step(self, model, batch, ctx):
        group = ctx.group("cand")
        lo, hi = self.columns(ctx)
        cand, valid, positive = batch["cand"][:, lo:hi], batch["valid"][:, lo:hi], batch["positive"]
        scores = model.scores(batch["user"], cand)
        scores = scores.masked_fill(self.dropped(cand, valid, positive), float("-inf"))
        own = model.scores(batch["user"], positive.unsqueeze(1))
        if ctx.rank > 0:
            own = own * 0
        else:
            scores = torch.cat([own, scores], dim=1)
        top = scores.detach().amax(1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        mass = SumOut.apply((scores - top.unsqueeze(1)).exp().sum(1), group)
        loss = mass.log() + top - SumOut.apply(own.squeeze(1), group)
        (loss.sum() / len(loss)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def dropped(self, cand, valid, positive):
        return cand == positive.unsqueeze(1) | ~valid


EXPECT = dict(
    right=[
        r"pad|invalid|valid|mask|empty slot|item (0|zero)",
        r"candidate|negative|softmax|logsumexp|denominator|normali[sz]er",
        (
            r"not (masked|dropped|excluded|removed|left out)|kept|stay|included|count|enter|"
            r"leak|precedence|binds|unmasked|take part|missing|still|wrong mask|"
            r"mask(ed)? wrong|ignor"
        ),
    ],
    place=[
        r"dropped",
        r"mask",
        r"valid",
        r"item\.weight|item embedding|row 0",
        r"scores?",
        r"cand",
    ],
    wrong=[
        (
            r"accidental hits? (are|is) (not|kept)|positive (item )?(is )?(kept|counted) (as|"
            r"among)"
        ),
        r"temperature|log_scale (is )?(missing|twice|not)",
        r"reduced twice|divided by (the )?(world|number of ranks)",
        r"detach",
        r"local(ly)? (softmax|maximum)|own (softmax|normali[sz]er)",
    ],
)

WHY = """`cand == positive | ~valid` is parsed as `cand == (positive | ~valid)`: for valid slots
the comparison is the right one (hits are dropped), for padded slots it asks whether item
0 equals a number with its lowest bit set, which is never true, so padded slots stay in
the softmax as copies of the negative item 0. Every gradient is wrong: row 0 of the item
table gets a gradient that it should not have, and the softmax mass of true negatives is
too small in rows with padding. The positive's accidental hits and the sums over ranks are
right. A right cause says that padded (invalid) candidates are not masked out of the
softmax; the fix is parentheses: `(cand == positive) | ~valid`."""
