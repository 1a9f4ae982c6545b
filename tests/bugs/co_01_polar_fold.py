"""A small weather model on a latitude-longitude grid (wind u and v, temperature; two convolutions
with a residual). Latitudes are cut over sp (3): 3, 2 and 2 of 7 rows; five states in micro-batches
of two. Longitude is periodic. Beyond a pole lies the same row half a turn away, where vector
components (u, v and the hidden channels of that kind) have the other sign.

Each strip gets its halo rows by a hand-written autograd function; the strips at the poles fold
their own row.

Bug: on the way back the fold turns the gradient by half a turn, but leaves the signs of the vector
channels as they are. After tripolar and polar halo updates whose adjoint was written for scalars.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
STATES, LAT, LON, HIDDEN = 5, 7, 6, 6
SIGNS = torch.tensor([-1.0, -1.0, 1.0])


def fold(row):
    """The row beyond the pole: half a turn away, vector channels with the other sign."""
    signs = SIGNS.to(row.dtype).repeat(row.shape[1] // 3)
    return row.roll(LON // 2, -1) * signs[:, None]


def half_turn(row):
    return row.roll(LON // 2, -1)


def plain_halo(x):
    return torch.cat([fold(x[:, :, 0])[:, :, None], x, fold(x[:, :, -1])[:, :, None]], 2)


class PolarHalo(torch.autograd.Function):
    fold_back = staticmethod(fold)

    @staticmethod
    def forward(ctx, x, group):
        r, n = dist.get_rank(group), dist.get_world_size(group)
        ctx.group, ctx.r, ctx.n = group, r, n
        edges = x.new_zeros(n, 2, *x[:, :, 0].shape)
        edges[r, 0], edges[r, 1] = x[:, :, 0], x[:, :, -1]
        dist.all_reduce(edges, group=group)
        above = edges[r - 1, 1] if r > 0 else fold(x[:, :, 0])
        below = edges[r + 1, 0] if r < n - 1 else fold(x[:, :, -1])
        return torch.cat([above[:, :, None], x, below[:, :, None]], 2)

    @classmethod
    def send_back(cls, ctx, g):
        r, n = ctx.r, ctx.n
        above, own, below = g[:, :, 0], g[:, :, 1:-1].clone(), g[:, :, -1]
        edges = g.new_zeros(n, 2, *above.shape)
        if r > 0:
            edges[r - 1, 1] = above
        else:
            edges[r, 0] = cls.fold_back(above)
        if r < n - 1:
            edges[r + 1, 0] = below
        else:
            edges[r, 1] = cls.fold_back(below)
        dist.all_reduce(edges, group=ctx.group)
        own[:, :, 0] += edges[r, 0]
        own[:, :, -1] += edges[r, 1]
        return own, None

    @staticmethod
    def backward(ctx, g):
        return PolarHalo.send_back(ctx, g)


class PolarHaloTurned(PolarHalo):
    fold_back = staticmethod(half_turn)

    @staticmethod
    def backward(ctx, g):
        return PolarHaloTurned.send_back(ctx, g)


class Weather(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(3, HIDDEN, 3)
        self.leave = nn.Conv2d(HIDDEN, 3, 3)

    def forward(self, x, halo=plain_halo):
        def around(t):
            return torch.cat([t[..., -1:], t, t[..., :1]], -1)

        h = torch.tanh(self.enter(around(halo(x))))
        return x + self.leave(around(halo(h)))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 1)
        return Weather()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 100)
        return {
            "now": torch.randn(STATES, 3, LAT, LON, generator=g),
            "next": torch.randn(STATES, 3, LAT, LON, generator=g),
        }

    def squared(self, wanted, found, lo=0):
        degrees = torch.linspace(-75, 75, LAT, dtype=wanted.dtype)[lo : lo + wanted.shape[2]]
        return ((found - wanted).square() * torch.deg2rad(degrees).cos()[:, None]).sum()

    def loss_sum(self, model, rows):
        return self.squared(rows["next"], model(rows["now"])), rows["next"].numel()

    def halo(self, x, group):
        return PolarHalo.apply(x, group)

    def step(self, model, batch, ctx):
        group = ctx.group("sp")
        r, n = ctx.coords["sp"], ctx.axes["sp"]
        strip = torch.arange(LAT).tensor_split(n)[r]
        for rows in torch.arange(STATES).split(2):
            now, wanted = (batch[k][rows][:, :, strip] for k in ("now", "next"))
            found = model(now, lambda x: self.halo(x, group))
            loss = self.squared(wanted, found, int(strip[0]))
            (loss / batch["next"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def halo(self, x, group):
        return PolarHaloTurned.apply(x, group)


EXPECT = dict(
    right=[
        r"halo|pole|polar|fold|PolarHalo",
        r"backward|adjoint|gradient|way back|send_back|fold_back",
        r"sign|minus|negat|-1|SIGNS|vector|half_turn|not the (adjoint|transpose|derivative)|"
        r"does not (match|agree)|disagree|inconsist|differs? from|wrong (gradient|derivative)",
    ],
    place=[r"PolarHaloTurned", r"half_turn", r"fold_back", r"send_back", r"\bhalo\b"],
    wrong=[
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"roll.{0,30}(wrong|missing|other direction)",
        r"(latitude|cos|area).{0,30}weight.{0,30}(wrong|missing|own)",
        r"(overwrit|replac)\w+.{0,30}edge",
        r"(micro.?batch|rank).{0,30}(mean of means|averag)",
    ],
)
WHY = """PolarHalo.forward fills the row beyond a pole with fold(row): half a turn and the signs of
the vector channels changed. Its adjoint is fold again. PolarHaloTurned sends the gradient of this
row back with half_turn, that is without the signs, so that the gradient of u, v and the hidden
vector channels reaches the polar rows with the wrong sign. Outputs and losses are right; enter's
weight and bias are wrong (leave's are right). Fix: fold_back = fold."""
