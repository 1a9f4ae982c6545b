"""Diffusion that sharpens pictures, with the preconditioning of Karras et al. (EDM): the network
sees the noisy picture times c_in, next to a hint (a coarse picture) as it is. FSDP2 over three
ranks (3, 3 and 2 of 8 pictures), the blocks and the root sharded, two micro-batches, gradients
reduced with the second.

Bug: the trainer's own preconditioner puts noisy picture and hint side by side first and multiplies
both by c_in. After conditional EDM trainers derived from the unconditional one.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ROWS, SIDE, WIDTH, SPREAD = 8, 5, 7, 0.6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.level = nn.Linear(4, 2 * WIDTH)
        self.down = nn.Conv2d(WIDTH, WIDTH, 1)

    def forward(self, x, level):
        scale, shift = self.level(level)[:, :, None, None].chunk(2, 1)
        return x + self.down(F.silu(self.up(x) * (1 + scale) + shift))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Conv2d(1 + 2, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.leave = nn.Conv2d(WIDTH, 1, 3, padding=1)

    def forward(self, x, c_noise):
        turns = c_noise[:, None] * c_noise.new_tensor([1.0, 3.0])
        level = torch.cat([turns.sin(), turns.cos()], 1)
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, level)
        return self.leave(x)


def coefficients(sigma):
    whole = sigma.square() + SPREAD**2
    c_skip, c_out = SPREAD**2 / whole, sigma * SPREAD / whole.sqrt()
    return c_skip, c_out, 1 / whole.sqrt(), sigma.log() / 4


def denoised(net, noisy, hint, sigma):
    c_skip, c_out, c_in, c_noise = (c[:, None, None, None] for c in coefficients(sigma))
    out = net(torch.cat([c_in * noisy, hint], 1), c_noise.flatten())
    return c_skip * noisy + c_out * out


def denoised_with_hint(net, noisy, hint, sigma):
    c_skip, c_out, c_in, c_noise = (c[:, None, None, None] for c in coefficients(sigma))
    out = net(c_in * torch.cat([noisy, hint], 1), c_noise.flatten())
    return c_skip * noisy + c_out * out


def weighted_error(denoise, net, rows):
    sigma = rows["sigma"]
    noisy = rows["sharp"] + sigma[:, None, None, None] * rows["noise"]
    error = denoise(net, noisy, rows["hint"], sigma) - rows["sharp"]
    weight = (sigma.square() + SPREAD**2) / (sigma * SPREAD).square()
    return (weight * error.square().sum((1, 2, 3))).sum()


class Clean:
    denoise = staticmethod(denoised)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 91)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 910)
        return {
            "sharp": torch.randn(ROWS, 1, SIDE, SIDE, generator=g) * SPREAD,
            "hint": torch.randn(ROWS, 2, SIDE, SIDE, generator=g),
            "noise": torch.randn(ROWS, 1, SIDE, SIDE, generator=g),
            "sigma": (torch.randn(ROWS, generator=g) * 0.9 - 0.6).exp(),
        }

    def loss_sum(self, model, rows):
        return weighted_error(denoised, model, rows), rows["sharp"].numel()

    def distribute(self, model, ctx):
        mesh = init_device_mesh("cpu", (ctx.axes["dp"],))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def step(self, model, batch, ctx):
        ranks = ctx.axes["dp"]
        own = torch.arange(ROWS).tensor_split(ranks)[ctx.coords["dp"]]
        parts = own.tensor_split(2)
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == len(parts) - 1)
            loss = weighted_error(self.denoise, model, {k: v[part] for k, v in batch.items()})
            (loss * ranks / batch["sharp"].numel()).backward()


class Buggy(Clean):
    denoise = staticmethod(denoised_with_hint)


EXPECT = dict(
    right=[
        r"hint|condition|c_in|denoised_with_hint|concat|\bcat\b",
        r"c_in|scal|multipl|factor|precondition|times|denoised_with_hint",
        r"hint|condition|both|concat|\bcat\b|all (three )?channels|denoised_with_hint",
    ],
    place=[
        r"denoised_with_hint",
        r"\bc_in\b",
        r"c_in \* torch\.cat",
        r"self\.denoise",
        r"\benter\b",
    ],
    wrong=[
        r"(missing|not|never|twice).{0,20}(all.?reduc|reduce.?scatter)",
        r"set_requires_gradient_sync.{0,40}(wrong|missing|early|late)",
        r"c_skip.{0,30}(wrong|missing)|c_out.{0,30}(wrong|missing)",
        r"weight.{0,40}(sigma|loss).{0,20}wrong",
        r"(micro.?batch|rank).{0,30}mean of means",
    ],
)
WHY = """EDM multiplies the noisy picture by c_in = 1 / sqrt(sigma^2 + spread^2) for unit size;
the hint has unit size already and goes in as it is. denoised_with_hint concatenates before it
multiplies, so the two hint channels are scaled by c_in of the row as well: another input of
`enter`, all gradients wrong on all ranks. c_skip, c_out, weights, FSDP2 are right.
Fix: torch.cat([c_in * noisy, hint], 1)."""
