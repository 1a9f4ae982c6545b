"""A detector's deformable attention (learned sampling offsets around reference points, three
feature levels, none square), the levels dealt out over three ranks: each projects and samples
its own level, the samples are summed over the ranks.

Bug: the rank's own copy of the sampling divides the offsets, which are (x, y) in pixels, by the
shape of its map as it comes, (height, width), and not by (width, height). After
reimplementations of Deformable DETR's offset_normalizer, which stacks spatial_shapes[..., 1]
before [..., 0].
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"level": 3}}}}
SHAPES, CHANNELS, WIDTH, HEADS, POINTS, QUERIES, ROWS = [(5, 9), (3, 7), (2, 4)], 4, 6, 2, 3, 5, 5


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class SumUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class DeformableDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.where = nn.Linear(WIDTH, 2)
        self.offsets = nn.Linear(WIDTH, HEADS * len(SHAPES) * POINTS * 2)
        self.weights = nn.Linear(WIDTH, HEADS * len(SHAPES) * POINTS)
        self.value = nn.ModuleList(nn.Linear(CHANNELS, WIDTH) for _ in SHAPES)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.box = nn.Linear(WIDTH, 4)
        self.group = None

    def normalizer(self, feature):
        height, width = feature.shape[-2:]
        return feature.new_tensor([width, height])

    def sample(self, level, feature, reference, offsets, weights):
        """One level; offsets (queries, heads, points, 2), weights (queries, heads, points)."""
        value = self.value[level](feature.movedim(1, -1)).movedim(-1, 1)
        rows = value.shape[0]
        value = value.unflatten(1, (HEADS, -1)).flatten(0, 1)
        spots = reference[:, None, None] + offsets / self.normalizer(feature)
        grid = (2 * spots - 1).transpose(0, 1).repeat(rows, 1, 1, 1)
        got = F.grid_sample(value, grid, align_corners=False)
        got = got.unflatten(0, (rows, HEADS)) * weights.transpose(0, 1)[None, :, None]
        return got.sum(-1).flatten(1, 2).transpose(1, 2)

    def forward(self, maps, levels):
        q = self.query if self.group is None else Into.apply(self.query, self.group)
        reference = self.where(q).sigmoid()
        offsets = self.offsets(q).view(QUERIES, HEADS, len(SHAPES), POINTS, 2)
        weights = (
            self.weights(q)
            .view(QUERIES, HEADS, -1)
            .softmax(-1)
            .view(QUERIES, HEADS, len(SHAPES), POINTS)
        )
        got = sum(
            self.sample(i, maps[i], reference, offsets[:, :, i], weights[:, :, i]) for i in levels
        )
        if self.group is not None:
            got = SumUp.apply(got, self.group)
        return self.box(self.norm(self.query + self.out(got)))


class LevelDetector(DeformableDetector):
    def normalizer(self, feature):
        return torch.tensor(feature.shape[-2:], dtype=feature.dtype)


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        model = DeformableDetector()
        with torch.no_grad():
            model.offsets.bias.normal_(0, 1.2)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 900)
        maps = {
            f"map{i}": torch.randn(ROWS, CHANNELS, *shape, generator=g)
            for i, shape in enumerate(SHAPES)
        }
        return {**maps, "box": torch.randn(ROWS, QUERIES, 4, generator=g)}

    @staticmethod
    def run(model, rows, levels):
        maps = [rows[f"map{i}"] for i in range(len(SHAPES))]
        return (model(maps, levels) - rows["box"]).square().sum()

    def loss_sum(self, model, rows):
        return self.run(model, rows, range(len(SHAPES))), len(rows["box"])

    def distribute(self, model, ctx):
        model.group = ctx.group("level")
        for i in range(len(SHAPES)):
            if i != dist.get_rank(model.group):
                model.value[i] = nn.Identity()
        return model

    def step(self, model, batch, ctx):
        level = dist.get_rank(model.group)
        for lo in range(0, ROWS, 3):
            (
                self.run(model, {k: v[lo : lo + 3] for k, v in batch.items()}, [level]) / ROWS
            ).backward()
        for module in (model.where, model.offsets, model.weights):
            for p in module.parameters():
                dist.all_reduce(p.grad, group=model.group)


class Buggy(Clean):
    def distribute(self, model, ctx):
        model.__class__ = LevelDetector
        return super().distribute(model, ctx)


EXPECT = dict(
    right=[
        "offset|normali[sz]|sampling (location|point|spot)|spots",
        (
            r"height|width|\(?\bh\b ?, ?w\b|\bx\b.{0,12}\by\b|axes|axis|swap|order of"
            "|transpos|flip"
        ),
    ],
    place=[
        "normalizer",
        "LevelDetector",
        r"feature\.shape|shape\[-2:\]",
        "offset",
        r"def sample|\bspots\b|grid_sample",
    ],
    wrong=[
        "softmax (over|within|of) (the )?(own|local) level",
        r"(missing|not|never) (\w+ ){0,3}all.?reduc",
        "align_corners",
        "level (index|number)",
        "reference points? (is|are) (not )?(detached|shared)",
        r"divid\w+ by the number of (levels|ranks)",
    ],
)
WHY = (
    "The sampling offsets are (x, y) in pixels and have to be divided by (width, height) to "
    "become fractions of the map. LevelDetector.normalizer takes feature.shape[-2:], which is "
    "(height, width), so on maps that aren't square x offsets are divided by the height and y "
    "offsets by the width, on every rank for its own level. The sampled places are wrong, and "
    "with them practically all gradients: offsets, weights, where, value, query and all "
    "behind them. A right cause says that the offsets' normaliser has height and width (x and "
    "y) exchanged. Fix: flip the shape, as in DeformableDetector.normalizer."
)
