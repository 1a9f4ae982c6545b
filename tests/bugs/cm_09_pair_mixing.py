"""A small convolutional classifier trained on pairs of images that are mixed with each other
(mixup: lam * x + (1 - lam) * partner, both ways). Rows (pairs) over dp (3): 3, 2 and 2 of 7, in
micro-batches of two; gradients are summed in one flat bucket.

Bug: the mixing is written in one line and in place, x.mul_(lam).add_(x.flip(1).mul_(1 - lam)):
mul_ has run before the argument of add_ is made, so that the partner is already scaled by lam.
After the two-line form in timm's Mixup, which makes the flipped copy first.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
PAIRS, CHANNELS, SIDE, CLASSES = 7, 2, 7, 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, 6, 3, stride=2)
        self.norm = nn.GroupNorm(2, 6)
        self.second = nn.Conv2d(6, 8, 2, groups=2)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.gelu(self.norm(self.first(x)))
        return self.out(F.gelu(self.second(x)).mean((2, 3)))


def mixed(pair, lam):
    """pair (n, 2, ...), lam (n): each of the two with its partner."""
    lam = lam.view(-1, *[1] * (pair.ndim - 1))
    return lam * pair + (1 - lam) * pair.flip(1)


def mix_(pair, lam):
    lam = lam.view(-1, *[1] * (pair.ndim - 1))
    partner = pair.flip(1).mul_(1 - lam)
    return pair.mul_(lam).add_(partner)


def mix_at_once_(pair, lam):
    lam = lam.view(-1, *[1] * (pair.ndim - 1))
    return pair.mul_(lam).add_(pair.flip(1).mul_(1 - lam))


class Clean:
    mix = staticmethod(mix_)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        return {
            "pair": torch.randn(PAIRS, 2, CHANNELS, SIDE, SIDE, generator=g),
            "label": torch.randint(CLASSES, (PAIRS, 2), generator=g),
            "lam": torch.rand(PAIRS, generator=g) * 0.6 + 0.2,
        }

    def summed(self, model, images, labels, lam):
        logits = model(images.flatten(0, 1))
        targets = mixed(F.one_hot(labels, CLASSES).to(logits.dtype), lam).flatten(0, 1)
        return F.cross_entropy(logits, targets, reduction="sum")

    def loss_sum(self, model, rows):
        images = mixed(rows["pair"], rows["lam"])
        return self.summed(model, images, rows["label"], rows["lam"]), rows["label"].numel()

    def step(self, model, batch, ctx):
        own = torch.arange(PAIRS).tensor_split(ctx.axes["dp"])[ctx.coords["dp"]]
        for rows in own.split(2):
            # Indexing copies: the batch itself is not changed by the mixing.
            pair, lam = batch["pair"][rows], batch["lam"][rows]
            loss = self.summed(model, self.mix(pair, lam), batch["label"][rows], lam)
            (loss / batch["label"].numel()).backward()
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat, group=ctx.group("dp"))
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))


class Buggy(Clean):
    mix = staticmethod(mix_at_once_)


EXPECT = dict(
    right=[
        r"mix|partner|flip|lam\b|pair",
        r"in.?place|already|mul_|overwrit|scaled (twice|by lam)|lam\s*\*\s*\(1|alias|evaluat|"
        r"modified|changed before",
        r"mix|mul_|flip|image|input|pair|lam",
    ],
    place=[r"mix_at_once_", r"mul_\(lam\)", r"pair\.flip", r"\bmix\b", r"\bmixed\b"],
    wrong=[
        r"(label|target).{0,30}(not mixed|wrong|swapped|unmixed)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(flat|bucket).{0,40}(order|offset|wrong|alias)",
        r"(batch|next micro.?batch).{0,40}(corrupt|changed|modified) (by|in)",
        r"(micro.?batch|rank).{0,30}mean of means",
        r"(random|generator|\bRNG\b).{0,30}(differ|wrong|state|order)",
    ],
)
WHY = """In pair.mul_(lam).add_(pair.flip(1).mul_(1 - lam)) Python runs mul_ before it evaluates the
argument of add_, so the flipped partner is taken from the scaled pair: the images become
lam * x + (1 - lam) * lam * partner. Targets are mixed rightly. All gradients are wrong because the
input of the net is; reduction and divisor are right. A right cause says that the partner is already
scaled by lam (in-place order). Fix: make the flipped copy first, as mix_ does."""
