"""A detector's decoder with deformable attention on 2 x 2 ranks: two data parallel ranks (rows 0-5 and 6-9, two micro-batches each), and the heads of the attention cut over two tensor parallel ranks by hand. Each query looks at a few
places of a feature map of 4 x 9 cells around its reference point: learnt offsets in cells are divided by the size of the map and added to the point. The divisor is the number of images.

The bug: points and offsets are (x, y), and the offsets are divided by (height, width). On a square map nobody sees it. After fundamentalvision/Deformable-DETR issue 6 (Possible Normalization Bug in Deformable Attention Coordinates)
and pull request 7 (Fix offset norm hw order bug in MSDeformAttn module), and open-mmlab/mmcv issue 3200.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "tp": 2}}}}
CHANNELS, WIDTH, HEADS, POINTS, QUERIES = 3, 8, 4, 2, 3
HIGH, WIDE, CLASSES, ROWS = 4, 9, 4, 10
PARTS = [[(0, 4), (4, 6)], [(6, 7), (7, 10)]]


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class DeformableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)
        self.offsets = nn.Linear(WIDTH, HEADS * POINTS * 2)
        self.weights = nn.Linear(WIDTH, HEADS * POINTS)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.heads, self.group, self.width_first = HEADS, None, True

    def cut(self, rank, size, group):
        self.heads, self.group = HEADS // size, group
        for layer in (self.value, self.offsets, self.weights):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(size)[rank].clone())
            layer.bias = nn.Parameter(layer.bias.detach().chunk(size)[rank].clone())
        self.out.weight = nn.Parameter(self.out.weight.detach().chunk(size, 1)[rank].clone())

    def forward(self, query, points, feature):
        if self.group is not None:
            query, feature = Copy.apply(query, self.group), Copy.apply(feature, self.group)
        rows, high, wide = len(feature), feature.shape[-2], feature.shape[-1]
        value = self.value(feature.flatten(2).transpose(1, 2))
        value = value.transpose(1, 2).reshape(rows * self.heads, -1, high, wide)
        offsets = self.offsets(query).view(rows, QUERIES, self.heads, POINTS, 2)
        size = offsets.new_tensor([wide, high] if self.width_first else [high, wide])
        where = points[:, :, None, None] + offsets / size
        grid = (2 * where - 1).transpose(1, 2).flatten(0, 1)
        seen = F.grid_sample(value, grid, align_corners=False)
        weights = self.weights(query).view(rows, QUERIES, self.heads, POINTS).softmax(-1)
        seen = (seen * weights.transpose(1, 2).flatten(0, 1)[:, None]).sum(-1)
        result = F.linear(seen.view(rows, -1, QUERIES).transpose(1, 2), self.out.weight)
        if self.group is not None:
            result = Reduce.apply(result, self.group)
        return result + self.out.bias


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.queries = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.attention, self.norm = DeformableAttention(), nn.LayerNorm(WIDTH)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, image, points):
        query = self.queries.expand(len(image), -1, -1)
        x = self.norm(query + self.attention(query, points, self.stem(image).tanh()))
        return self.classes(x), self.boxes(x)


def detection_loss(model, rows):
    classes, boxes = model(rows["image"], rows["points"])
    named = F.cross_entropy(classes.flatten(0, 1), rows["label"].flatten(), reduction="sum")
    return named + F.mse_loss(boxes, rows["box"], reduction="sum")


class Clean:
    width_first = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "image": torch.randn(ROWS, CHANNELS, HIGH, WIDE, generator=g),
            "points": 0.3 + 0.4 * torch.rand(ROWS, QUERIES, 2, generator=g),
            "label": torch.randint(CLASSES, (ROWS, QUERIES), generator=g),
            "box": torch.rand(ROWS, QUERIES, 4, generator=g),
        }

    def loss_sum(self, model, rows):
        return detection_loss(model, rows), len(rows["label"])

    def distribute(self, model, ctx):
        model.attention.cut(ctx.coords["tp"], 2, ctx.group("tp"))
        model.attention.width_first = self.width_first
        return model

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for low, high in PARTS[ctx.coords["dp"]]:
            rows = {k: v[low:high] for k, v in batch.items()}
            (detection_loss(model, rows) / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=ctx.group("dp"))


class Buggy(Clean):
    width_first = False


EXPECT = dict(
    right=[
        r"(?i)attention|offset|grid|sampl|width_first|size",
        r"(?i)forward|divi|size|other (value|number)|computes with|times|normalis|argument|second argument|width|height",
    ],
    place=[r"(?i)attention|offsets?|grid_sample|/ size|where"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)",
        r"(?i)mean of means|divi(ded|des) by (its|their) own (rows|count|number)|wrong divisor of the loss",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten|never read)",
        r"(?i)labels? .{0,20}(is|are) wrong|other rows|wrong rows",
        r"(?i)only (on )?ranks? [0-3]\b(?!,)",
        r"(?i)stem.{0,20}(forward )?goes wrong|backward formula .{0,20}wrong",
    ],
)
WHY = (
    "On all four ranks, in every micro-batch and for all rows, DeformableAttention.forward divides the learnt offsets, which are (x, y) in cells, by (height, width) = (4, 9) and not by (width, height) = (9, 4): `size`, the divisor in "
    "`where = points + offsets / size`. The x offset becomes 9/4 times what it should be, the y offset 4/9 times. So the places that grid_sample reads, the attention's output, and everything after it are wrong; what goes into the attention "
    "(queries, stem), its value, offsets and weights projections are right in the forward. All gradients are wrong. The cut of the heads, Copy and Reduce, the sum over dp and the divisor 10 are right. Fix: size = [wide, high]."
)
