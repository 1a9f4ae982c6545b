"""Sliced score matching with the random projections of a row spread over ranks: dp 2 x slice 2.

The loss of a row is the mean over three projections v of v' J v, J the Jacobian of the score
network, and half the squared score. The projections are random signs from a generator per row and
projection; each slice rank does some of them (2 + 1), with the fitting share of the squared
score, and gradients are summed over both axes.

The bug: v' J v is formed by a helper that draws from the projections' generators on either side
of the Jacobian, so the two sides are different vectors. After Hutchinson trace estimators in
score and flow code (FFJORD-style divergence functions that draw inside).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "slice": 2}}}}

ROWS, DIM, SLICES = 7, 5, 3


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, 13)
        self.gate = nn.Linear(DIM, 13)
        self.outer = nn.Linear(13, DIM)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)) * torch.sigmoid(self.gate(x)))


class Signs:
    """Random signs for given rows and one projection."""

    def __init__(self, ids, slice_number):
        self.generators = [
            torch.Generator().manual_seed(1000 * row + slice_number) for row in ids.tolist()
        ]

    def draw(self, like):
        drawn = [torch.randint(2, (DIM,), generator=g) for g in self.generators]
        return (2 * torch.stack(drawn) - 1).to(like)


def curvature(score, x, signs):
    """v' J v of each row."""
    v = signs.draw(x)
    (pulled,) = torch.autograd.grad((score * v).sum(), x, create_graph=True)
    return (pulled * v).sum(1)


def divergence(score, x, signs):
    """v' J v of each row."""
    projected = (score * signs.draw(x)).sum()
    (pulled,) = torch.autograd.grad(projected, x, create_graph=True)
    return (pulled * signs.draw(x)).sum(1)


def sliced_loss(model, rows, slices, trace):
    x = rows["x"].detach().clone().requires_grad_(True)
    with torch.enable_grad():
        score = model(x)
        total = score.square().sum(1) * (0.5 * len(slices))
        for number in slices:
            total = total + trace(score, x, Signs(rows["id"], number))
    return total.sum() / SLICES


class Clean:
    trace = staticmethod(curvature)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        return Score()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 102)
        return {"x": torch.randn(ROWS, DIM, generator=g), "id": torch.arange(ROWS) + 3}

    def loss_sum(self, model, rows):
        return sliced_loss(model, rows, list(range(SLICES)), curvature), len(rows["x"])

    def step(self, model, batch, ctx):
        own = {k: v.tensor_split(2)[ctx.coords["dp"]] for k, v in batch.items()}
        slices = torch.arange(SLICES).tensor_split(2)[ctx.coords["slice"]].tolist()
        loss = sliced_loss(model, own, slices, self.trace)
        (loss / len(batch["x"])).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp", "slice"))


class Buggy(Clean):
    trace = staticmethod(divergence)


EXPECT = dict(
    right=[
        r"project|probe|sign|vector|noise|random|draw|generator|hutchinson|\bv\b",
        (
            r"twice|two (different|draws|vectors|probes|projections)|second (draw|call|time)|"
            r"different|again|both sides|either side|not the same|another|advance|redrawn|"
            r"fresh|independent"
        ),
    ],
    place=[r"divergence", r"signs?\.draw", r"\bSigns\b", r"trace", r"sliced_loss"],
    wrong=[
        r"(without|no|missing|lacks) create_graph|create_graph (is )?(missing|left|false)",
        r"seed(ed)? (by|per|with) rank",
        r"squared score (is )?(counted|added) (twice|on every)",
        r"slices? (is|are) divided",
        r"(not|never) (reduced|summed) over slice",
    ],
)
WHY = (
    "divergence() calls signs.draw once for the vector in front of the Jacobian and once more "
    "for the one behind it; the generator has moved on, so it computes v' J w with independent "
    "signs, whose expectation is zero, instead of v' J v, which estimates the trace. The "
    "gradient of the curvature part is wrong in all weights of inner, gate and outer (the outer "
    "bias gets none from it and is right), while the part of the squared score, the share of "
    "the slices and the sums over both axes are right. A right cause says that two different "
    "random vectors are used on the two sides of the Jacobian. The fix is to draw v once and "
    "use it twice."
)
