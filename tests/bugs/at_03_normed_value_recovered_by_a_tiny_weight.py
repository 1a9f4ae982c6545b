"""Fully sharded data parallelism (FSDP2, two ranks, uneven micro-batches, gradients reduced with the last one only) of residual blocks whose layer norm is an own autograd Function that saves memory: it keeps its output instead of its
input. Some channels of the norms start switched off (weight zero), as with zero-initialised or pruned channels.

The bug: the backward recovers the normed input from the output as (y - bias) / weight, with the weight held away from zero by a small number. Where the weight is zero nothing can be recovered: the normed value comes out as zero. As with
memory_efficient=True of apex's FusedLayerNorm (NVIDIA/apex PR 1715 and its clamp of the weight by magnitude). The right code keeps the normed value.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2}}}}
FEATURES, WIDTH, CLASSES, TINY = 5, 8, 4, 1e-5
PARTS = [[(0, 3), (3, 5), (5, 6)], [(6, 8), (8, 11), (11, 13)]]


class SlimNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, recover):
        mean = x.mean(-1, keepdim=True)
        rstd = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5)
        normed = (x - mean) * rstd
        y = normed * weight + bias
        ctx.recover = recover
        ctx.save_for_backward(y if recover else normed, weight, bias, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        kept, weight, bias, rstd = ctx.saved_tensors
        normed = kept
        if ctx.recover:
            held = torch.where(weight < 0, weight.clamp(max=-TINY), weight.clamp(min=TINY))
            normed = (kept - bias) / held
        dn = dy * weight
        dx = dn - dn.mean(-1, keepdim=True) - normed * (dn * normed).mean(-1, keepdim=True)
        rows = (dy * normed).flatten(0, -2), dy.flatten(0, -2)
        return dx * rstd, rows[0].sum(0), rows[1].sum(0), None


class Norm(nn.Module):
    def __init__(self, off):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) + 1)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.3)
        with torch.no_grad():
            self.weight[off] = 0
        self.recover = False

    def forward(self, x):
        return SlimNorm.apply(x, self.weight, self.bias, self.recover)


class Block(nn.Module):
    def __init__(self, off):
        super().__init__()
        self.norm, self.up, self.down = Norm(off), nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Block([1, 6]), Block([0, 3, 4])])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Clean:
    recover = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "x": torch.randn(rows, 3, FEATURES, generator=g),
            "label": torch.randint(CLASSES, (rows, 3), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["x"]).flatten(0, 1)
        return F.cross_entropy(scores, rows["label"].flatten(), reduction="sum"), rows[
            "label"
        ].numel()

    def distribute(self, model, ctx):
        for block in model.blocks:
            block.norm.recover = self.recover
            fully_shard(block, mesh=ctx.mesh["dp"])
        fully_shard(model, mesh=ctx.mesh["dp"])
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            rows = {k: v[low:high] for k, v in batch.items()}
            loss, _ = self.loss_sum(model, rows)
            (loss * ctx.world_size / batch["label"].numel()).backward()


class Buggy(Clean):
    recover = True


EXPECT = dict(
    right=[
        r"(?i)norm",
        r"(?i)backward|adjoint|gradient (of|that|with)|hands? (back|on)|recomput|recover",
    ],
    place=[r"(?i)SlimNorm|blocks(\.\d)?(\.norm)?|norm"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)(up|down|head)\.(weight|bias) (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [01]\b|rank [01] alone",
        r"(?i)norm\.bias .{0,12}(is|are) wrong",
    ],
)
WHY = (
    "The forward is right on both ranks. In the backward of SlimNorm the normed value of channels whose weight is zero (blocks.0.norm: channels 1 and 6, blocks.1.norm: 0, 3 and 4) comes out as (y - bias) / 1e-5 = 0. So norm.weight gets "
    "gradient zero in these channels instead of sum dy * normed, and the gradient by the input of the norm lacks its third part (- normed * mean(dn * normed) * rstd) in these channels; the mean "
    "itself is right, since there dn is zero. norm.bias is "
    "right for blocks.1; up and down of blocks.1 and the head are right. What lies before blocks.1.norm (stem and all of blocks.0) gets a wrong gradient, all rows and micro-batches, both ranks alike. "
    "FSDP2's reduction, the switch for the last micro-batch, "
    "the divisor 39 are right. Fix: keep the normed value (or the input) where a weight is close to zero."
)
