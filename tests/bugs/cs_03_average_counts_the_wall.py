"""transformers' PoolFormer for image classification with spatial parallelism: the rows of patches
(7) lie on three ranks (3, 2 and 2), micro-batches of two images. The layers' pooling gets one row
of its neighbours, group norms and the last mean are summed over the strips with autograd.

Each rank's loss is a third of the loss, and what is summed in the forward is summed in the
backward, so that the parameters' gradients are summed over the strips.

Bug: the pooling of a strip divides by nine everywhere. PoolFormer's AvgPool2d has
count_include_pad=False: at the wall of the image the window is smaller. After ports of average
pooling to padded tiles that forget this option (its default is True).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PoolFormerConfig, PoolFormerForImageClassification

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
IMAGES, HIGH, WIDE, PATCH, LABELS = 5, 7, 5, 2, 4


class SumStrips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Halo(torch.autograd.Function):
    """One row of either neighbour; zeros beyond the image."""

    @staticmethod
    def forward(ctx, x, group):
        own, ctx.group = dist.get_rank(group), group
        edges = x.new_zeros(dist.get_world_size(group) + 2, 2, *x[:, :, 0].shape)
        edges[own + 1, 0], edges[own + 1, 1] = x[:, :, 0], x[:, :, -1]
        dist.all_reduce(edges, group=group)
        return torch.cat([edges[own, 1].unsqueeze(2), x, edges[own + 2, 0].unsqueeze(2)], 2)

    @staticmethod
    def backward(ctx, g):
        own, group = dist.get_rank(ctx.group), ctx.group
        edges = g.new_zeros(dist.get_world_size(group) + 2, 2, *g[:, :, 0].shape)
        edges[own, 1], edges[own + 2, 0] = g[:, :, 0], g[:, :, -1]
        dist.all_reduce(edges, group=group)
        g = g[:, :, 1:-1].clone()
        g[:, :, 0] += edges[own + 1, 0]
        g[:, :, -1] += edges[own + 1, 1]
        return g, None


class StripNorm(nn.Module):
    def __init__(self, norm, group):
        super().__init__()
        self.weight, self.bias, self.eps, self.group = norm.weight, norm.bias, norm.eps, group

    def forward(self, x):
        count = x.shape[1] * HIGH * WIDE
        mean = SumStrips.apply(x.sum((1, 2, 3), keepdim=True), self.group) / count
        x = x - mean
        var = SumStrips.apply(x.square().sum((1, 2, 3), keepdim=True), self.group) / count
        return x * (var + self.eps).rsqrt() * self.weight[:, None, None] + self.bias[:, None, None]


class StripPooling(nn.Module):
    def __init__(self, lo, hi, group):
        super().__init__()
        self.lo, self.hi, self.group = lo, hi, group

    def cells(self, x):
        inside = F.pad(x.new_ones(1, 1, HIGH, WIDE), (1, 1, 1, 1))
        return F.avg_pool2d(inside, 3, 1, divisor_override=1)[:, :, self.lo : self.hi]

    def forward(self, x):
        total = F.avg_pool2d(Halo.apply(x, self.group), 3, 1, (0, 1), divisor_override=1)
        return total / self.cells(x) - x


class TilePooling(StripPooling):
    def forward(self, x):
        return F.avg_pool2d(Halo.apply(x, self.group), 3, stride=1, padding=(0, 1)) - x


class Clean:
    pooling = StripPooling

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 31)
        config = PoolFormerConfig(
            num_channels=2,
            num_encoder_blocks=1,
            depths=[2],
            hidden_sizes=[6],
            patch_sizes=[PATCH],
            strides=[PATCH],
            padding=[0],
            pool_size=3,
            mlp_ratio=1.5,
            drop_path_rate=0.0,
            layer_scale_init_value=0.8,
            initializer_range=0.4,
            num_labels=LABELS,
        )
        model = PoolFormerForImageClassification(config)
        for p in model.parameters():
            p.data += 0.2 * torch.randn(p.shape)
        return model

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 311)
        return {
            "image": torch.randn(IMAGES, 2, HIGH * PATCH, WIDE * PATCH, generator=g),
            "label": torch.randint(LABELS, (IMAGES,), generator=g),
        }

    def loss_sum(self, model, rows):
        logits = model(pixel_values=rows["image"]).logits
        return F.cross_entropy(logits, rows["label"], reduction="sum"), rows["label"].shape[0]

    def distribute(self, model, ctx):
        self.group = ctx.group("sp")
        own = torch.arange(HIGH).tensor_split(ctx.axes["sp"])[ctx.coords["sp"]]
        self.lo, self.hi = int(own[0]), int(own[-1]) + 1
        for layer in model.poolformer.encoder.block[0]:
            layer.pooling = self.pooling(self.lo, self.hi, self.group)
            layer.before_norm = StripNorm(layer.before_norm, self.group)
            layer.after_norm = StripNorm(layer.after_norm, self.group)
        model.norm = StripNorm(model.norm, self.group)
        return model

    def logits(self, model, image):
        strip = image[:, :, self.lo * PATCH : self.hi * PATCH]
        hidden = model.norm(model.poolformer(pixel_values=strip).last_hidden_state)
        pooled = SumStrips.apply(hidden.sum((2, 3)), self.group) / (HIGH * WIDE)
        return model.classifier(pooled)

    def step(self, model, batch, ctx):
        for part in torch.arange(IMAGES).split(2):
            logits = self.logits(model, batch["image"][part])
            loss = F.cross_entropy(logits, batch["label"][part], reduction="sum")
            (loss / IMAGES / ctx.axes["sp"]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=self.group)


class Buggy(Clean):
    pooling = TilePooling


EXPECT = dict(
    right=[
        r"pool",
        r"count|divi[sd]|pad|nine|\b9\b|average|mean|number of cells|window|zero",
        r"edge|border|boundar|wall|pad|outside|beyond|corner|outer|count_include_pad|cells",
    ],
    place=[r"TilePooling", r"\bpooling\b", r"avg_pool2d", r"block\.0\.\d"],
    wrong=[
        r"halo.{0,40}(missing|stale|not exchanged|detached|without grad)",
        r"norm.{0,40}(own strip|local statistic|not summed)",
        r"(missing|not|never|twice).{0,20}all.?reduc",
        r"uneven.{0,40}(rows|strips)",
    ],
)
WHY = """PoolFormer averages over the cells of the 3 x 3 window that lie in the image
(count_include_pad=False): six at an edge, four in a corner. TilePooling takes avg_pool2d with its
default over the strip with halo, so that the zeros at the left, right, top and bottom of the image
are counted and the sum is divided by nine. Inner cells, halos and norms are right. A right cause
names the pooling and its divisor at the border. Fix: divide the sums by self.cells(x)."""
