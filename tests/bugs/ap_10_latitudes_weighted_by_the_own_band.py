"""Weather model on a latitude-longitude grid, the 11 latitudes cut into bands of 4, 4 and 3 over three ranks (sp), two micro-batches of fields. A network per point with the latitude as an input and a zonal mean mixes along longitude;
squared errors are weighted with cos(latitude), normalised to mean one over the grid. Divisor: all points of the batch; parameter gradients summed over sp.

The bug: the weights are normalised after the grid has been cut, by the mean of the own band: the bands near the poles get the same total weight as the band at the equator. After latitude-weighted losses as in ecmwf/WeatherGenerator
issue 466 / 2635 and NCAR/miles-credit PR 66, under the spatial parallelism of such models.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
LATITUDES, LONGITUDES, FIELDS, WIDTH = 11, 4, 2, 6
BANDS, PARTS = [0, 4, 8, 11], [(0, 2), (2, 3)]
ROWS = 3


def latitudes(dtype):
    return torch.linspace(-75, 75, LATITUDES, dtype=dtype).deg2rad()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.zonal = nn.Linear(FIELDS + 1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, FIELDS)

    def forward(self, x, band=slice(None)):
        place = latitudes(x.dtype)[band].sin()[None, :, None, None].expand(*x.shape[:3], 1)
        x = torch.tanh(self.inner(torch.cat([x, place], -1)))
        return self.out(torch.tanh(x + self.zonal(x.mean(2, keepdim=True))))


class Clean:
    own_mean = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (ROWS, LATITUDES, LONGITUDES, FIELDS)
        return {"now": torch.randn(shape, generator=g), "next": torch.randn(shape, generator=g)}

    def loss_sum(self, model, rows):
        weight = latitudes(rows["now"].dtype).cos()
        weight = (weight / weight.mean())[None, :, None]
        error = (model(rows["now"]) - rows["next"]).square().sum(-1)
        return (error * weight).sum(), error.numel()

    def step(self, model, batch, ctx):
        band = slice(BANDS[ctx.rank], BANDS[ctx.rank + 1])
        weight = latitudes(batch["now"].dtype).cos()
        weight = weight[band] / (weight[band] if self.own_mean else weight).mean()
        for low, high in PARTS:
            guess = model(batch["now"][low:high, band], band)
            error = (guess - batch["next"][low:high, band]).square().sum(-1)
            loss = (error * weight[None, :, None]).sum()
            (loss / (ROWS * LATITUDES * LONGITUDES)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("sp"))


class Buggy(Clean):
    own_mean = True


EXPECT = dict(
    right=[
        r"(?i)rank|band|latitude|shard|part of the (grid|rows|tokens|tensor)|share",
        r"(?i)weight|factor|scale|divi|normal|coefficient|times|count(s)? (too )?(much|little|more|less)",
        r"(?i)own|local|per rank|each rank|different|unlike|unequal|rank [012]|not the same|other factor|of its",
    ],
    place=[r"(?i)loss|weight|latitude|band|rank [012]|each rank|all parameters|divisor|error"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward|(output|activation)s? (is|are) wrong",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|weighted)|only the (first|last) micro.?batch",
        r"(?i)wrong only in the backward|adjoint|halo|hand(s|ed) (back|on) (the )?wrong",
        r"(?i)(inner|zonal|out)(\.weight|\.bias)? alone|only (the )?(inner|zonal|out)\b",
        r"(?i)same factor on all ranks|factor of (1/)?3\b",
    ],
)
_COS = latitudes(torch.float64).cos()
WHY = (
    "Each rank divides cos(latitude) by the mean over its own band instead of over all 11 latitudes. The rank's whole contribution to the loss (all its points, both micro-batches, all rows) is multiplied by mean(all) / mean(own): "
    + ", ".join(
        f"rank {r} (latitudes {a}-{b - 1}) {float(_COS.mean() / _COS[a:b].mean()):.4f}"
        for r, (a, b) in enumerate(zip(BANDS[:-1], BANDS[1:]))
    )
    + ". So the summed gradient of all parameters is wrong in direction, equally on all ranks after the sum. The model's forward, the latitude input, "
    "the divisor 132, the micro-batches and the sum over sp are right. Fix: normalise over the whole grid before the cut "
    "(or all-reduce sum and count)."
)
