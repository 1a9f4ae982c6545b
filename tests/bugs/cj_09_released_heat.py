"""A calorimeter model: a small network gives the heat flow at uneven times, and its integral over
the run is compared with the measured heat, beside a pointwise loss.

Parallelism: context parallel, the times of every run are cut over cp (3); weights are replicated,
gradients summed. The integral is a trapezoidal sum, added over the ranks.

Bug: each rank integrates its own stretch with torch.trapezoid; the interval between the last time
of a rank and the first of the next belongs to nobody. After time-sharded Hawkes/ODE/NeRF
quadrature code.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"cp": 3}}}}
T = 13


class SumForAll(torch.autograd.Function):
    """The sum over ranks of parts; what follows is the same on every rank."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class EdgeExchange(torch.autograd.Function):
    """The first column of every rank, on every rank."""

    @staticmethod
    def forward(ctx, x, place, world, group):
        ctx.place, ctx.group = place, group
        full = x.new_zeros(x.shape[0], world)
        full[:, place] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g[:, ctx.place], None, None, None


class HeatFlow(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 9)
        self.middle = nn.Linear(9, 9)
        self.flow = nn.Linear(9, 1)

    def forward(self, x, time):
        h = torch.tanh(self.enter(torch.cat([x, time.unsqueeze(-1)], -1)))
        return self.flow(torch.tanh(self.middle(h)) + h).squeeze(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return HeatFlow()

    def batch(self):
        g = torch.Generator().manual_seed(900 + self.seed)
        return {
            "x": torch.randn(5, T, 3, generator=g),
            "time": (torch.rand(5, T, generator=g) + 0.1).cumsum(-1) / 3,
            "flow": torch.randn(5, T, generator=g),
            "heat": torch.randn(5, generator=g),
        }

    def loss_sum(self, model, rows):
        flow = model(rows["x"], rows["time"])
        heat = torch.trapezoid(flow, rows["time"])
        loss = (heat - rows["heat"]).square().sum() + 0.5 * (flow - rows["flow"]).square().sum()
        return loss, rows["heat"].shape[0]

    def own_heat(self, flow, time, hi, ctx):
        place, cp = ctx.coords["cp"], ctx.axes["cp"]
        first = EdgeExchange.apply(flow[:, 0], place, cp, ctx.group("cp"))
        own = time[:, hi - flow.shape[1] : hi]
        if place < cp - 1:
            flow = torch.cat([flow, first[:, place + 1 : place + 2]], 1)
            own = torch.cat([own, time[:, hi : hi + 1]], 1)
        else:
            flow = flow + 0.0 * first.sum()
        return torch.trapezoid(flow, own)

    def step(self, model, batch, ctx):
        cp, place, group = ctx.axes["cp"], ctx.coords["cp"], ctx.group("cp")
        cuts = [round(i * T / cp) for i in range(cp + 1)]
        lo, hi = cuts[place], cuts[place + 1]
        flow = model(batch["x"][:, lo:hi], batch["time"][:, lo:hi])
        heat = SumForAll.apply(self.own_heat(flow, batch["time"], hi, ctx), group)
        points = 0.5 * (flow - batch["flow"][:, lo:hi]).square().sum()
        loss = (heat - batch["heat"]).square().sum() + points
        (loss / batch["heat"].shape[0]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def own_heat(self, flow, time, hi, ctx):
        return torch.trapezoid(flow, time[:, hi - flow.shape[1] : hi])


EXPECT = dict(
    right=[
        r"interval|gap|between|bound|border|edge|seam|segment|junction|neighbou?r|next rank|across",
        r"integral|trapez|heat|quadrature",
    ],
    place=[r"own_heat", r"trapezoid", r"\bheat\b", r"integral"],
    wrong=[
        r"SumForAll.*(backward|twice|cp times)",
        r"pointwise .*(wrong|counted)",
        r"time .*(starts|restart)",
        r"not (all.?)?reduced",
    ],
)
WHY = """Every rank integrates only its own stretch of time; the two intervals between the last
time of one rank and the first time of the next are in no rank's sum. The total heat lacks these
trapezoids, so the residual is wrong and the points at the cuts have too small quadrature weights.
All parameters' gradients are wrong through the heat term; the pointwise term is right. A right
cause says that the intervals between the shards are left out of the trapezoidal integral. The fix
is to append the next rank's first flow and time, with gradient."""
