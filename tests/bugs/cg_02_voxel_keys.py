"""Submanifold sparse convolutions on scanned tiles (occupied cells only), data parallel with DDP.

A rank lays the occupied cells of its samples one behind the other, numbers them with one integer
key each and finds the neighbours of every cell by looking its key up in the sorted keys (a
rulebook, as in spconv or MinkowskiEngine).

The bug: the key is ``(sample * H + y) * W + x`` without a rim round the grid, and the lookup does
not test the bounds. A step over the right border of a tile is the key of the first cell of the
next line, and a step under the lower border is one in the first line of the next sample. After
home-made rulebooks that hash coordinates to one flat integer.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}

ROWS, CELLS, HEIGHT, WIDTH, FEATURES = 8, 11, 4, 5, 3
OFFSETS = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]


def compare_all(coords):
    """Neighbour pairs (to, from) for every offset: the cells of each sample compared."""
    pairs, cells = [], coords.shape[1]
    base = torch.arange(coords.shape[0])[:, None] * cells
    for dy, dx in OFFSETS:
        wanted = coords + torch.tensor([dy, dx])
        hit = (wanted[:, :, None] == coords[:, None]).all(-1)
        b, i, j = hit.nonzero(as_tuple=True)
        pairs.append((base[b, 0] + i, base[b, 0] + j))
    return pairs


def cell_key(sample, y, x):
    return (sample * (HEIGHT + 2) + y + 1) * (WIDTH + 2) + x + 1


def flat_key(sample, y, x):
    return (sample * HEIGHT + y) * WIDTH + x


def rulebook(coords, key=cell_key):
    samples, cells = coords.shape[:2]
    sample = torch.arange(samples)[:, None].expand(samples, cells)
    keys, order = key(sample, coords[..., 0], coords[..., 1]).reshape(-1).sort()
    pairs = []
    for dy, dx in OFFSETS:
        wanted = key(sample, coords[..., 0] + dy, coords[..., 1] + dx).reshape(-1)
        at = torch.searchsorted(keys, wanted).clamp(max=keys.numel() - 1)
        to = (keys[at] == wanted).nonzero().squeeze(1)
        pairs.append((to, order[at[to]]))
    return pairs


class SparseConv(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(len(OFFSETS), inner, outer) * (0.5 / inner**0.5))
        self.bias = nn.Parameter(torch.randn(outer) * 0.1)

    def forward(self, x, pairs):
        out = self.bias.expand(x.shape[0], -1)
        for weight, (to, source) in zip(self.weight, pairs, strict=True):
            out = out.index_add(0, to, x[source] @ weight)
        return out


class TileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = SparseConv(FEATURES, 7), SparseConv(7, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, features, pairs):
        samples, cells = features.shape[:2]
        x = torch.tanh(self.first(features.flatten(0, 1), pairs))
        x = torch.tanh(self.second(x, pairs))
        return self.head(x.view(samples, cells, -1).sum(1)).squeeze(-1)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(31 + self.seed)
        return TileNet()

    def batch(self):
        g = torch.Generator().manual_seed(77 + self.seed)
        flat = torch.stack(
            [torch.randperm(HEIGHT * WIDTH, generator=g)[:CELLS] for _ in range(ROWS)]
        )
        return {
            "coords": torch.stack([flat // WIDTH, flat % WIDTH], -1),
            "features": torch.randn(ROWS, CELLS, FEATURES, generator=g),
            "height": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        out = model(rows["features"], compare_all(rows["coords"]))
        return (out - rows["height"]).square().sum(), rows["height"].shape[0]

    def rules(self, coords):
        return rulebook(coords)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        rank, world = ctx.coords["dp"], dist.get_world_size(ctx.group("dp"))
        mine = {k: torch.tensor_split(v, world)[rank] for k, v in batch.items()}
        out = model(mine["features"], self.rules(mine["coords"]))
        ((out - mine["height"]).square().sum() * world / ROWS).backward()


class Buggy(Clean):
    def rules(self, coords):
        return rulebook(coords, key=flat_key)


EXPECT = dict(
    right=[
        r"key|hash|flat(tened)? ind|rulebook|lookup|look(s|ed)? up|searchsorted",
        (
            r"wrap|border|bound|rim|edge of|padding|margin|halo|out[- ]of[- ]range|next "
            r"(row|line|sample)|collid|collision|other sample|across samples|neighbou?ring "
            r"(row|line|sample)"
        ),
    ],
    place=[r"flat_key", r"cell_key", r"rulebook", r"SparseConv", r"HEIGHT \+ y", r"rules\("],
    wrong=[
        r"world|divis(or|ion)|normali[sz]",
        r"uneven (rows|split|batch)",
        r"bias (is )?(added|counted)",
        r"sorted keys are not (mapped|put) back|order (is )?not inverted",
    ],
)

WHY = (
    "The flat key leaves no rim round a tile, so the key of a position outside of the tile "
    "equals the key of a cell inside: x = W is x = 0 of the next line, x = -1 the last cell "
    "of the line before, y = H the first line of the next sample in the rank's batch. The "
    "rulebook has no bounds check, so these cells become neighbours and the convolution "
    "mixes features over the borders and between samples. The offsets with dy or dx get "
    "false pairs, and since both layers and the head see the mixed features all gradients "
    "are wrong (the head's bias and everything else through the changed output); the number "
    "of rows and the reduction over ranks are right. A right cause says that neighbour keys "
    "wrap round at the grid's border (into the next line or sample). The fix is a key with a "
    "rim of one cell, or a test of the bounds before the lookup."
)
