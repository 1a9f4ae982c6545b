"""Speech recognition with continuous integrate-and-fire (CIF): every frame has a weight, the
weights are accumulated, and a word fires each time the sum passes a whole number; in training the
weights are scaled so that their sum is the number of words. A second term, |sum of the weights -
number of words|, teaches the unscaled weights how many words there are. Six utterances over dp (2)
and time over cp (2: five and four frames); micro-batches of two utterances.

The cp ranks gather weights and features of all frames (the backward sums and takes the own part),
and each scores its own words.

Bug: the quantity term of the ranks is taken from the scaled weights, whose sum is the number of
words whatever the network says. After CIF ports that overwrite `alpha` by its scaled version
before the quantity loss is computed.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "cp": 2}}}}
ROWS, T, MELS, D, U, WORDS, QUANTITY = 6, 9, 5, 6, 4, 8, 0.7


class GatherFrames(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lo, group):
        ctx.lo, ctx.own, ctx.group = lo, x.shape[1], group
        full = x.new_zeros(x.shape[0], T, *x.shape[2:])
        full[:, lo : lo + x.shape[1]] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.lo : ctx.lo + ctx.own], None, None


def scaled(alpha, words):
    return alpha * (words / alpha.sum(1))[:, None]


def fire(alpha, h, wanted):
    """Word u is the mean of what lies between u and u + 1 on the scale of accumulated weights."""
    end = alpha.cumsum(1)[:, None]
    begin = end - alpha[:, None]
    u = wanted[None, :, None].to(alpha.dtype)
    share = (torch.minimum(end, u + 1) - torch.maximum(begin, u)).clamp(min=0)
    return share @ h


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(MELS, D)
        self.frame = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.GELU())
        self.weight = nn.Linear(D, 1)
        self.decode = nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, WORDS))

    def frames(self, sound):
        h = self.enter(sound)
        h = h + self.frame(h)
        return h, self.weight(h)[..., 0].sigmoid()


def words_loss(model, alpha, h, rows, wanted):
    logits = model.decode(fire(alpha, h, wanted))
    label = rows["text"][:, wanted].masked_fill(wanted >= rows["words"][:, None], -100)
    return F.cross_entropy(logits.flatten(0, 1), label.flatten(), reduction="sum")


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 41)
        return Recogniser()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 410)
        return {
            "sound": torch.randn(ROWS, T, MELS, generator=g),
            "text": torch.randint(WORDS, (ROWS, U), generator=g),
            "words": torch.randint(2, U + 1, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        h, alpha = model.frames(rows["sound"])
        quantity = (alpha.sum(1) - rows["words"]).abs().sum()
        loss = words_loss(model, scaled(alpha, rows["words"]), h, rows, torch.arange(U))
        return loss + QUANTITY * quantity, rows["words"].sum()

    def losses(self, model, alpha, h, rows, wanted):
        quantity = (alpha.sum(1) - rows["words"]).abs().sum()
        alpha = scaled(alpha, rows["words"])
        return words_loss(model, alpha, h, rows, wanted), quantity

    def step(self, model, batch, ctx):
        cp, r, group = ctx.axes["cp"], ctx.coords["cp"], ctx.group("cp")
        frames = torch.arange(T).tensor_split(cp)[r]
        wanted = torch.arange(U).tensor_split(cp)[r]
        own = torch.arange(ROWS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for part in own.split(2):
            rows = {k: v[part] for k, v in batch.items()}
            h, alpha = model.frames(rows["sound"][:, frames])
            lo = int(frames[0])
            h, alpha = GatherFrames.apply(h, lo, group), GatherFrames.apply(alpha, lo, group)
            words, quantity = self.losses(model, alpha, h, rows, wanted)
            loss = words + QUANTITY * quantity / cp
            (loss / batch["words"].sum()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def losses(self, model, alpha, h, rows, wanted):
        alpha = scaled(alpha, rows["words"])
        words = words_loss(model, alpha, h, rows, wanted)
        quantity = (alpha.sum(1) - rows["words"]).abs().sum()
        return words, quantity


EXPECT = dict(
    right=[
        r"quantity|second term|auxiliary|length (loss|term)|count(ing)? (loss|term)|"
        r"sum of (the )?(weights|alpha)|alpha\.sum|\babs\b",
        r"scal|normalis|normaliz|zero|vanish|nought|no gradient|missing|constant|always|"
        r"lost|absent|drops?|not (counted|there|in)",
    ],
    place=[r"\blosses\b", r"\bquantity\b", r"\bscaled\b", r"\bweight\.(weight|bias)", r"alpha"],
    wrong=[
        r"GatherFrames",
        r"(not|never|twice).{0,20}(all.?)?reduc",
        r"cumsum.{0,40}(offset|own)",
        r"(words|tokens).{0,30}(mean of means|own count)",
        r"quantity.{0,30}(counted|added).{0,20}(twice|both|cp)",
    ],
)
WHY = """CIF's quantity loss belongs to the unscaled weights. Buggy.losses replaces alpha by its
scaled version first; the scaled weights of an utterance add up to its number of words, so the term
is zero (up to rounding) and constant: the whole gradient of 0.7 |sum alpha - words| is missing,
from weight.* and through h from frame and enter. The decoder's gradients are right. Communications
and normalisation are right. The fix is to take the sum before scaling."""
