"""A small audio denoiser (stacked 1-d convolutions with reflect padding) cut along time over
three ranks.

Interior borders exchange halos, the two ends of the recording are padded by reflection, all
inside one hand-written Function. In its backward the gradient of the reflected samples is added
to the edge without turning it round again. After spatial-parallel convolution layers whose
backward was first written for zero and replicate padding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"sp": 3}}}}
LENGTH = 26


def swap_edges(left, right, group):
    """What the left neighbour's right edge and the right neighbour's left edge hold."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    both = torch.stack([left, right]).contiguous()
    parts = [torch.empty_like(both) for _ in range(world)]
    dist.all_gather(parts, both, group=group)
    before = parts[rank - 1][1] if rank > 0 else None
    after = parts[rank + 1][0] if rank < world - 1 else None
    return before, after


class HaloPad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pad, group):
        ctx.pad, ctx.group = pad, group
        before, after = swap_edges(x[..., :pad], x[..., -pad:], group)
        if before is None:
            before = x[..., 1 : pad + 1].flip(-1)
        if after is None:
            after = x[..., -pad - 1 : -1].flip(-1)
        return torch.cat([before, x, after], dim=-1)

    @staticmethod
    def backward(ctx, grad):
        pad = ctx.pad
        left, inner, right = grad[..., :pad], grad[..., pad:-pad].clone(), grad[..., -pad:]
        before, after = swap_edges(left, right, ctx.group)
        if before is None:
            inner[..., 1 : pad + 1] += left.flip(-1)
        else:
            inner[..., :pad] += before
        if after is None:
            inner[..., -pad - 1 : -1] += right.flip(-1)
        else:
            inner[..., -pad:] += after
        return inner, None, None


class HaloPadInPlace(HaloPad):
    """As HaloPad; the backward writes each strip with one add."""

    @staticmethod
    def backward(ctx, grad):
        pad = ctx.pad
        left, inner, right = grad[..., :pad], grad[..., pad:-pad].clone(), grad[..., -pad:]
        before, after = swap_edges(left, right, ctx.group)
        first = slice(1, pad + 1) if before is None else slice(0, pad)
        inner[..., first] += left if before is None else before
        last = slice(-pad - 1, -1) if after is None else slice(-pad, None)
        inner[..., last] += right if after is None else after
        return inner, None, None


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(2, 5, 5)
        self.b = nn.Conv1d(5, 7, 7)
        self.c = nn.Conv1d(7, 2, 3)

    def forward(self, x, pad=lambda x, n: F.pad(x, (n, n), mode="reflect")):
        x = torch.tanh(self.a(pad(x, 2)))
        x = torch.tanh(self.b(pad(x, 3)))
        return self.c(pad(x, 1))


class Clean:
    halo = HaloPad

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(51 + self.seed)
        return Denoiser()

    def batch(self):
        g = torch.Generator().manual_seed(61 + self.seed)
        clean = torch.randn(5, 2, LENGTH, generator=g)
        return {"noisy": clean + 0.3 * torch.randn(5, 2, LENGTH, generator=g), "clean": clean}

    def loss_sum(self, model, rows):
        return (model(rows["noisy"]) - rows["clean"]).abs().pow(1.5).sum(), rows["clean"].numel()

    def step(self, model, batch, ctx):
        group = ctx.group("sp")
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        noisy, clean = (batch[k].tensor_split(world, -1)[rank] for k in ("noisy", "clean"))
        out = model(noisy, lambda x, n: self.halo.apply(x, n, group))
        ((out - clean).abs().pow(1.5).sum() / batch["clean"].numel()).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    halo = HaloPadInPlace


EXPECT = {
    "right": [
        r"reflect|mirror|\bends?\b|outer (edge|border)|first and (the )?last",
        r"flip|revers|turn\w* (round|around|back)|order|mirror\w* back|orientation",
    ],
    "place": [r"HaloPadInPlace", r"backward", r"HaloPad", r"inner\[", r"slice\(1, ?pad"],
    "wrong": [
        r"halo (gradient )?(is )?(dropped|not sent|lost|detached)",
        r"overwrit",
        r"swapped (the )?neighbou?rs|wrong neighbou?r|left and right (are )?(swapped|exchanged)",
        r"zero padding|replicate padding",
        r"uneven|divided by|count",
    ],
}

WHY = (
    "Reflect padding copies the samples 1..pad in reversed order, so its adjoint has to flip "
    "the gradient of the pad before adding it to the samples 1..pad (and likewise at the "
    "right end). The backward of HaloPadInPlace adds it unflipped, so at the two ends of the "
    "recording the contributions go to the wrong samples (except with a pad of 1). The "
    "forward is right; gradients that pass back through the padding of conv b are wrong, "
    "which are those of conv a, while b and c are right. A right cause says that the gradient "
    "of the reflected ends is not flipped (reversed). Fix: left.flip(-1), right.flip(-1)."
)
