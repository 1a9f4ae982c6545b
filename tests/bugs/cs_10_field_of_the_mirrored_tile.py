"""A small weather model on a grid of 6 latitudes x 6 longitudes (circular in longitude) with a
learnt static field that enters with the state and a learnt climate that is added at the end. Domain
parallelism h 2 x w 2: states and both learnt maps are cut into tiles of 3 x 3; the convolutions get
a row and a column of the neighbours (with corners). Two micro-batches of the 5 states. The tiles of
the maps belong to their rank alone, the rest is summed over h and w.

Bug: the maps are cut with the coordinates of the mesh in the other order, so that two of the four
ranks hold each other's tiles. After domain-parallel weather models whose mesh is (lon, lat) while
tensors are (lat, lon).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"h": 2, "w": 2}}}}
STATES, SIDE, CHANNELS, STATIC, HIDDEN = 5, 6, 3, 2, 5


def around(x):
    """One cell on each side: zeros beyond the poles, circular in longitude."""
    return F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1))


class TileAround(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, tile, group):
        ctx.tile, ctx.group = tile, group
        whole = x.new_zeros(*x.shape[:2], SIDE, SIDE)
        whole[..., tile[0], tile[1]] = x
        dist.all_reduce(whole, group=group)
        high, wide = (slice(s.start, s.stop + 2) for s in tile)
        return around(whole)[..., high, wide].clone()

    @staticmethod
    def backward(ctx, g):
        wide = g.new_zeros(*g.shape[:2], SIDE + 2, SIDE + 2)
        wide[..., slice(ctx.tile[0].start, ctx.tile[0].stop + 2), :][
            ..., slice(ctx.tile[1].start, ctx.tile[1].stop + 2)
        ] = g
        dist.all_reduce(wide, group=ctx.group)
        whole = wide[..., 1:-1, 1:-1].clone()
        whole[..., 0] += wide[..., 1:-1, -1]
        whole[..., -1] += wide[..., 1:-1, 0]
        return whole[..., ctx.tile[0], ctx.tile[1]].clone(), None, None


class Weather(nn.Module):
    def __init__(self):
        super().__init__()
        self.static = nn.Parameter(torch.randn(STATIC, SIDE, SIDE))
        self.climate = nn.Parameter(torch.randn(CHANNELS, SIDE, SIDE))
        self.enter = nn.Conv2d(CHANNELS + STATIC, HIDDEN, 3)
        self.mix = nn.Conv2d(HIDDEN, HIDDEN, 3, bias=False)
        self.leave = nn.Conv2d(HIDDEN, CHANNELS, 1)
        self.around = around

    def forward(self, x):
        static = self.static.expand(x.shape[0], -1, -1, -1)
        h = F.gelu(self.enter(self.around(torch.cat([x, static], 1))))
        h = h + torch.tanh(self.mix(self.around(h)))
        return x + self.leave(h) * torch.sigmoid(self.climate) + self.climate


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 101)
        return Weather()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1011)
        shape = (STATES, CHANNELS, SIDE, SIDE)
        return {"now": torch.randn(shape, generator=g), "next": torch.randn(shape, generator=g)}

    def loss_sum(self, model, rows):
        area = torch.linspace(-1.2, 1.2, SIDE, dtype=rows["now"].dtype).cos()[:, None]
        error = (model(rows["now"]) - rows["next"]).square() * area
        return error.sum(), rows["now"].numel()

    def tile(self, ctx, axes):
        own = [torch.arange(SIDE).tensor_split(ctx.axes[a])[ctx.coords[a]] for a in axes]
        return tuple(slice(int(o[0]), int(o[-1]) + 1) for o in own)

    def tile_of_maps(self, ctx):
        return self.tile(ctx, ("h", "w"))

    def distribute(self, model, ctx):
        tile, group = self.tile(ctx, ("h", "w")), ctx.group("h", "w")
        high, wide = self.tile_of_maps(ctx)
        model.static = nn.Parameter(model.static.detach()[:, high, wide].clone())
        model.climate = nn.Parameter(model.climate.detach()[:, high, wide].clone())
        model.around = lambda x: TileAround.apply(x, tile, group)
        return model

    def step(self, model, batch, ctx):
        high, wide = self.tile(ctx, ("h", "w"))
        area = torch.linspace(-1.2, 1.2, SIDE, dtype=batch["now"].dtype).cos()[high, None]
        for part in torch.arange(STATES).tensor_split(2):
            now, after = (batch[k][part][..., high, wide] for k in ("now", "next"))
            error = (model(now) - after).square() * area
            (error.sum() / batch["now"].numel()).backward()
        for name, p in model.named_parameters():
            if name not in ("static", "climate"):
                dist.all_reduce(p.grad, group=ctx.group("h", "w"))


class Buggy(Clean):
    def tile_of_maps(self, ctx):
        return self.tile(ctx, ("w", "h"))


EXPECT = dict(
    right=[
        r"static|climate|map|field|tile_of_maps",
        r"tile|shard|slice|cut|part|block|region|coordinate|place|position",
        r"swap|other|transpos|mirror|exchang|axis order|order of|another|different|mismatch|"
        r"not match|interchang|wrong (tile|shard|slice|part|place|position|rank|region|block)",
    ],
    place=[r"tile_of_maps", r"\bdistribute\b", r"model\.(static|climate)", r"\b(static|climate)\b"],
    wrong=[
        r"TileAround.{0,30}backward.{0,30}(wrong|miss|drop)",
        r"(static|climate).{0,40}(not|never) (summed|all.?reduced|reduced)",
        r"area.{0,30}(wrong|weight|latitude)",
        r"(halo|corner)s?.{0,30}(missing|wrong|stale)",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """States are cut as (latitude by h, longitude by w). Buggy.tile_of_maps cuts both maps
with the axes exchanged (latitude by w, longitude by h): ranks (0, 0) and (1, 1) hold the right
tiles, (0, 1) and (1, 0) hold each other's and join them to states of another place. All gradients
become wrong. A right cause says that the static and climate maps' shards are those of the mirrored
tile / mesh axes swapped. Fix: cut them with ("h", "w") like the states."""
