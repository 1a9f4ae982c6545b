"""Activity recognition from sensor windows with FSDP2 on three ranks (two micro-batches each, of uneven size, the gradient reduced with the second). One fused layer norm (a hand-written autograd Function) is used in two places: on the
frames of a window (rows, frames, width) before the mixing over time, and on the pooled vector (rows, width) before the classifier.

The bug: the backward of the norm takes the number of rows from the first dimension, so on three-dimensional input the two means that it subtracts are means over frames and width together. On the pooled, two-dimensional vector it is
right. After flagos-ai/FlagGems issue 5392 (layer_norm_backward assumes 2-D input: silently wrong gradients for rank >= 3 inputs).
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
CHANNELS, FRAMES, WIDTH, CLASSES = 5, 6, 7, 4
PARTS = [[(0, 3), (3, 4)], [(4, 6), (6, 9)], [(9, 10), (10, 13)]]
ROWS = 13


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, lead):
        mean = x.mean(-1, keepdim=True)
        rstd = (x.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.lead = x.dim() - 1 if lead is None else lead
        return (x - mean) * rstd * weight + bias

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, rstd = ctx.saved_tensors
        unit, scaled = (x - mean) * rstd, grad * weight
        inner = list(range(ctx.lead, x.dim()))
        first = scaled.mean(inner, keepdim=True)
        second = (scaled * unit).mean(inner, keepdim=True)
        outer = list(range(x.dim() - 1))
        dx = rstd * (scaled - first - unit * second)
        return dx, (grad * unit).sum(outer), grad.sum(outer), None


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(width))
        self.bias = nn.Parameter(0.3 * torch.randn(width))
        self.lead = None

    def forward(self, x):
        return FusedNorm.apply(x, self.weight, self.bias, self.lead)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(CHANNELS, WIDTH)
        self.frame_norm, self.mix = Norm(WIDTH), nn.Linear(FRAMES, FRAMES)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.pool_norm, self.classifier = Norm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.frame_norm(self.entry(x))
        x = x + F.silu(self.mix(x.transpose(1, 2))).transpose(1, 2)
        return self.classifier(self.pool_norm(F.silu(self.wide(x)).mean(1)))


class Clean:
    lead = None

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "signal": torch.randn(ROWS, FRAMES, CHANNELS, generator=g),
            "activity": torch.randint(CLASSES, (ROWS,), generator=g),
        }

    def loss_sum(self, model, rows):
        scores = model(rows["signal"])
        return F.cross_entropy(scores, rows["activity"], reduction="sum"), len(scores)

    def distribute(self, model, ctx):
        for module in model.modules():
            if isinstance(module, Norm):
                module.lead = self.lead
        fully_shard(model, mesh=ctx.mesh)
        return model

    def step(self, model, batch, ctx):
        parts = PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            model.set_requires_gradient_sync(turn == len(parts) - 1)
            loss, _ = self.loss_sum(model, rows)
            (loss * ctx.world_size / ROWS).backward()


class Buggy(Clean):
    lead = 1


EXPECT = dict(
    right=[
        r"(?i)frame_norm|FusedNorm|\bNorm\b|layer.?norm",
        r"(?i)backward|adjoint|gradient (of|that|to|for)|hands? (back|on)|input gradient|derivative",
    ],
    place=[r"(?i)frame_norm|FusedNorm|entry"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)pool_norm(\.(weight|bias))? (is|are|goes|has) wrong|backward of pool_norm is wrong|\bmix(\.\w+)? (is|are) wrong|wide(\.\w+)? (is|are) wrong",
        r"(?i)not (been )?(all.?)?reduced|reduced twice|summed twice|counted twice|too (early|late)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|recomput|labels? .{0,20}(is|are) wrong",
    ],
)
WHY = (
    "The forward is right everywhere. In FusedNorm.backward the means of scaled and scaled * unit must be taken over the last dimension (lead = x.dim() - 1); with lead = 1 they are taken over all dimensions but the first. For the "
    "two-dimensional pool_norm that is the same, for the three-dimensional frame_norm the means run over frames and width together, so the gradient that frame_norm hands to its input is wrong on all ranks, in all micro-batches and rows. "
    "Wrong are entry.weight and entry.bias only (all that is before frame_norm); the gradients of frame_norm's own weight and bias, of mix, wide, pool_norm and classifier are right. FSDP2's reduction, the divisor 13 and the accumulation "
    "are right. Fix: lead = x.dim() - 1 (means over the normalised dimension only)."
)
