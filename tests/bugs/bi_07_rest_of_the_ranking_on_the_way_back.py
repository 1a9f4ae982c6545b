"""A reward model that learns from whole rankings (two to five answers per prompt, padded) with the Plackett-Luce likelihood (ListMLE): for every place the normaliser is the log-sum-exp of the scores from there to the end. A Function with
its own backward keeps only scores and normalisers. FSDP2 on two ranks, two micro-batches each (no gradient sync in the first); the divisor is the number of prompts.

The bug: the backward's running sum of 1 / normaliser goes over the same way as the forward's, from the end; a score is in the normalisers of its own and of all better places, so that it has to go from the front. After
huggingface/sentence-transformers PR 4012 (ListMLE by suffix logcumsumexp) and pytorch/pytorch PR 32876 (Adds LogCumSumExp, review of its backward).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
VOCABULARY, TOKENS, ANSWERS, WIDTH = 12, 5, 5, 8
MANY = [5, 3, 4, 2, 5, 4, 5, 3, 4]
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 9)]]


def from_the_end(x):
    return x.flip(1).cumsum(1).flip(1)


def from_the_front(x):
    return x.cumsum(1)


class RankingLoss(torch.autograd.Function):
    """Minus the log-likelihood of each row's ranking; scores come best first."""

    @staticmethod
    def forward(ctx, scores, valid, running):
        shifted = scores.masked_fill(~valid, -60.0)
        top = shifted.max(1, keepdim=True).values
        normaliser = from_the_end((shifted - top).exp()).log() + top
        ctx.save_for_backward(scores, normaliser, valid)
        ctx.running = running
        return ((normaliser - scores) * valid).sum(1)

    @staticmethod
    def backward(ctx, grad):
        scores, normaliser, valid = ctx.saved_tensors
        inverse = (-normaliser).exp().masked_fill(~valid, 0.0)
        share = scores.exp() * ctx.running(inverse) - 1
        return grad[:, None] * share * valid, None, None


class Reward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.read = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.wide, self.norm = nn.Linear(WIDTH, 13), nn.LayerNorm(13)
        self.value = nn.Linear(13, 1)

    def forward(self, ids):
        x = self.embed(ids).transpose(-1, -2)
        x = F.silu(self.read(x.flatten(0, 1))).amax(-1)
        x = self.value(F.silu(self.norm(self.wide(x))))
        return x.view(ids.shape[:2])


def ranking_loss(model, rows, running=from_the_front):
    scores = model(rows["ids"]).gather(1, rows["order"])
    valid = torch.arange(ANSWERS) < rows["many"][:, None]
    return RankingLoss.apply(scores, valid, running).sum()


class Clean:
    running = staticmethod(from_the_front)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Reward()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        order = torch.rand(len(MANY), ANSWERS, generator=g)
        beyond = torch.arange(ANSWERS) >= torch.tensor(MANY)[:, None]
        return {
            "ids": torch.randint(VOCABULARY, (len(MANY), ANSWERS, TOKENS), generator=g),
            "order": order.masked_fill(beyond, 2.0).argsort(dim=1, stable=True),
            "many": torch.tensor(MANY),
        }

    def loss_sum(self, model, rows):
        return ranking_loss(model, rows), len(rows["many"])

    def distribute(self, model, ctx):
        fully_shard(model.wide, mesh=ctx.mesh)
        return fully_shard(model, mesh=ctx.mesh)

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            loss = ranking_loss(model, rows, self.running)
            (loss * ctx.world_size / len(MANY)).backward()


class Buggy(Clean):
    running = staticmethod(from_the_end)


EXPECT = dict(
    right=[r"(?i)RankingLoss|gather|loss|scores", r"(?i)backward|gradient (of|that)|adjoint"],
    place=[r"(?i)RankingLoss|ranking_loss|from_the_(end|front)|scores|running"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in (the|its) forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) twice|gradient.?sync.{0,40}(wrong|missing)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)only (on )?rank [01]\b|recomput|order .{0,20}(is|are) wrong|backward of (value|norm|wide|read) (is )?wrong",
    ],
)
WHY = (
    "The forward of RankingLoss is right, all scores and losses are. In its backward the derivative for place j is sum over i <= j of exp(s_j - normaliser_i), minus one; the running sum is taken from the end (i >= j) instead of from the "
    "front. So the gradient that reaches the scores is wrong at all valid places (only by chance right), in all rows, micro-batches, on both ranks; padding stays zero. All parameters of the model are wrong by this alone; the backward "
    "of the modules, gather, FSDP2, its sync, the divisor 9 are right. Fix: inverse.cumsum(1) in the backward (from_the_front)."
)
