"""A physics-informed net for the equation of Fisher and Kolmogorov (learnt diffusion and growth),
data parallel over two ranks. Of 14 points 9 lie inside (squared residual) and 5 on the border
(squared error, weighted by 3); both kinds are dealt out over the ranks by themselves (5 and 4, 3
and 2) and taken in portions of two, an inner and a border portion per backward. All is divided by
the number of points.

Bug: a rank has more inner portions than border portions, and the border portions are taken from
itertools.cycle, so that the first one is met again. After training loops with two loaders of
unlike length, `zip(inner, cycle(border))`.
"""

from itertools import cycle, zip_longest

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
INNER, BORDER, WEIGHT = 9, 5, 3.0
POINTS = INNER + BORDER


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1)
        )
        self.log_spread = nn.Parameter(torch.tensor(-0.5))
        self.growth = nn.Parameter(torch.tensor(0.7))

    def forward(self, xt):
        return self.net(xt).squeeze(-1)

    def residual(self, xt):
        x, t = (xt[:, i].detach().requires_grad_() for i in (0, 1))
        with torch.enable_grad():
            u = self(torch.stack([x, t], 1))
            u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        return u_t - self.log_spread.exp() * u_xx - self.growth * u * (1 - u)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 83)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 831)
        inner = torch.arange(POINTS) % 3 != 1
        points = torch.rand(POINTS, 2, generator=g) * 2 - 1
        points[~inner, 1] = -1.0
        return {"xt": points, "u": torch.randn(POINTS, generator=g), "inner": inner}

    def inner_sum(self, model, rows):
        return model.residual(rows["xt"]).square().sum()

    def border_sum(self, model, rows):
        return WEIGHT * (model(rows["xt"]) - rows["u"]).square().sum()

    def loss_sum(self, model, rows):
        inner = {k: v[rows["inner"]] for k, v in rows.items()}
        border = {k: v[~rows["inner"]] for k, v in rows.items()}
        return self.inner_sum(model, inner) + self.border_sum(model, border), rows["u"].shape[0]

    def turns(self, inner, border):
        return zip_longest(inner, border)

    def step(self, model, batch, ctx):
        ranks, own = ctx.axes["dp"], ctx.coords["dp"]
        inner = batch["inner"].nonzero().squeeze(1).tensor_split(ranks)[own]
        border = (~batch["inner"]).nonzero().squeeze(1).tensor_split(ranks)[own]
        for some_inner, some_border in self.turns(inner.split(2), border.split(2)):
            loss = self.inner_sum(model, {k: v[some_inner] for k, v in batch.items()})
            if some_border is not None:
                rows = {k: v[some_border] for k, v in batch.items()}
                loss = loss + self.border_sum(model, rows)
            (loss / batch["u"].shape[0]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    def turns(self, inner, border):
        return zip(inner, cycle(border), strict=False)


EXPECT = dict(
    right=[
        r"border|boundary|portion|chunk|rows?|points?|micro.?batch|term",
        r"twice|two times|again|repeat|cycl|double|more than once|duplicat|several times|"
        r"too (much|often|many)|extra|reus",
    ],
    place=[r"\bturns\b", r"\bcycle\b", r"border_sum", r"some_border", r"zip\("],
    wrong=[
        r"residual.{0,40}(detach|graph|second derivative)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"(inner|interior).{0,40}(dropped|missing|lost|twice|left out)",
        r"uneven.{0,40}ranks",
        r"weight.{0,20}(three|3) (wrong|missing)",
    ],
)
WHY = """Each rank has three or two portions of inner points, but two or one of border points. Buggy
zips them with cycle(border), so that the first border portion of each rank comes again with the
last inner portion and counts twice; the other portions and the inner points count once. A right
cause says that some border points are counted twice. Fix: zip_longest, and no border term where
there is no portion left."""
