"""Ranking of up to six items for a user with the ListMLE loss (Plackett-Luce) under DDP on three ranks, with 3, 2 and 1 micro-batches (no_sync before the last). Items come in the order of their relevance, short lists are padded. The loss is
a fused autograd Function: the sum over places of logsumexp(scores from here on) - score. The divisor is the number of items of all ranks.

The bug: the forward adds up from the end of the list; the backward has to add up from its beginning, as a score is in the normaliser of its own and of all earlier places, and it goes from the end, too. After the ListMLE losses of
huggingface/sentence-transformers (pull request 3827) and keras-team/keras-rs (pull request 130).
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
USERS, ITEMS, WIDTH, LONGEST = 6, 12, 6, 6
LENGTHS = [6, 4, 3, 5, 6, 2, 4, 6, 5, 3, 4, 6, 5]
PARTS = [[(0, 2), (2, 3), (3, 5)], [(5, 8), (8, 10)], [(10, 13)]]


class PlackettLuce(torch.autograd.Function):
    """The sum over a list's places of log(sum of exp(scores from this place on)) - score."""

    @staticmethod
    def forward(ctx, scores, real, turned):
        below = scores.masked_fill(~real, float("-inf")).flip(1)
        rest = torch.logcumsumexp(below, 1).flip(1)
        rest = rest.masked_fill(~real, 0)
        ctx.save_for_backward(scores, real, rest)
        ctx.turned = turned
        return (rest - scores).masked_fill(~real, 0).sum()

    @staticmethod
    def backward(ctx, grad):
        scores, real, rest = ctx.saved_tensors
        inverse = (-rest).exp().masked_fill(~real, 0)
        if ctx.turned:
            inverse = inverse.flip(1).cumsum(1).flip(1)
        else:
            inverse = inverse.cumsum(1)
        return grad * (scores.exp() * inverse - 1).masked_fill(~real, 0), None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.tower = nn.Sequential(nn.Linear(2 * WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        self.turned = False

    def forward(self, user, items, length):
        user = self.users(user)[:, None].expand(-1, LONGEST, -1)
        scores = self.tower(torch.cat([user, self.items(items)], -1)).squeeze(-1)
        real = torch.arange(LONGEST)[None] < length[:, None]
        return PlackettLuce.apply(scores, real, self.turned)


class Clean:
    turned = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "user": torch.randint(USERS, (len(LENGTHS),), generator=g),
            "items": torch.randint(ITEMS, (len(LENGTHS), LONGEST), generator=g),
            "length": torch.tensor(LENGTHS),
        }

    def loss_sum(self, model, rows):
        return model(rows["user"], rows["items"], rows["length"]), int(rows["length"].sum())

    def distribute(self, model, ctx):
        model.turned = self.turned
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        items, parts = int(batch["length"].sum()), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                loss, _ = self.loss_sum(model, rows)
                (loss * ctx.world_size / items).backward()


class Buggy(Clean):
    turned = True


EXPECT = dict(
    right=[
        r"(?i)PlackettLuce|scores|tower|loss",
        r"(?i)backward|gradient (of|that)|adjoint|hands? (back|on)|formula",
    ],
    place=[r"(?i)PlackettLuce|tower|scores"],
    wrong=[
        r"(?i)(?<!not )forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"(?i)other rows|wrong rows|only (on )?rank [012]\b|rank [012] alone|recomput",
        r"(?i)padding .{0,25}(counted|gets a gradient)",
    ],
)
WHY = (
    "The forward, the scores and the loss are right. PlackettLuce.backward must give score k the gradient exp(s_k) times the sum over places i <= k of exp(-rest_i), minus 1; with turned it sums over i >= k (flip, cumsum, flip as in the forward). "
    "So on all ranks, in all micro-batches and rows (a list's every place: a sum over the wrong side) the gradient of the scores is wrong, and with it those of tower, users and items (the gradients of a list no longer sum to zero). "
    "Mask, padding, DDP, no_sync, divisor 59 are right. Fix: inverse.cumsum(1)."
)
