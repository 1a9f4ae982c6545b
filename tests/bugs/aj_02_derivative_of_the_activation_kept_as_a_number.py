"""Training of an interatomic potential on energies and forces under DDP on three ranks, two micro-batches each (no_sync for the first). The energy is a sum over atoms of a small network on radial features; the forces are minus the
gradient of the energy by the positions (autograd.grad with create_graph), and the loss has an energy term and a force term. The activation is an own autograd Function (a fused SiLU) with a backward of differentiable operations.

The bug: the Function saves the sigmoid of the input, an intermediate result of its forward that is neither input nor output. The first derivative is right, the derivative of the derivative takes the sigmoid for a constant. As in
pytorch/pytorch issue 58509 (custom Function intermediary results are dangerous for double backward), compare issues 76185 and 104040 there.
"""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
ATOMS, CENTRES, WIDTH = 4, 5, 6
PARTS = [[(0, 2), (2, 3)], [(3, 4), (4, 6)], [(6, 7), (7, 8)]]


class Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keep):
        gate = torch.sigmoid(x)
        ctx.keep = keep
        if keep:
            ctx.save_for_backward(x, gate)
        else:
            ctx.save_for_backward(x)
        return x * gate

    @staticmethod
    def backward(ctx, grad):
        if ctx.keep:
            x, gate = ctx.saved_tensors
        else:
            (x,) = ctx.saved_tensors
            gate = torch.sigmoid(x)
        return grad * gate * (1 + x * (1 - gate)), None


class Activation(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused, self.keep = False, False

    def forward(self, x):
        return Silu.apply(x, self.keep) if self.fused else F.silu(x)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.middle = nn.Linear(CENTRES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 1)
        self.act1, self.act2 = Activation(), Activation()

    def energy(self, places):
        apart = places[:, :, None] - places[:, None]
        square = apart.square().sum(-1)
        centres = torch.arange(CENTRES, dtype=places.dtype, device=places.device) * 0.7
        radial = torch.exp(-0.5 * (square[..., None] - centres).square())
        others = 1 - torch.eye(ATOMS, dtype=places.dtype, device=places.device)
        features = (radial * others[..., None]).sum(2)
        hidden = self.act2(self.middle(self.act1(self.inner(features))))
        return self.outer(hidden).squeeze(-1).sum(1)

    def forward(self, places):
        places = places.detach().requires_grad_()
        energy = self.energy(places)
        slope = torch.autograd.grad(energy.sum(), places, create_graph=True)[0]
        return energy, -slope


class Clean:
    keep = False

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Potential()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        rows = PARTS[-1][-1][1]
        return {
            "places": torch.randn(rows, ATOMS, 3, generator=g),
            "energy": torch.randn(rows, generator=g),
            "forces": torch.randn(rows, ATOMS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        energy, forces = model(rows["places"])
        loss = (energy - rows["energy"]).square().sum()
        return loss + 2 * (forces - rows["forces"]).square().sum(), len(rows["energy"])

    def distribute(self, model, ctx):
        for activation in (model.act1, model.act2):
            activation.fused, activation.keep = True, self.keep
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def step(self, model, batch, ctx):
        total, parts = len(batch["energy"]), PARTS[ctx.rank]
        for turn, (low, high) in enumerate(parts):
            rows = {k: v[low:high] for k, v in batch.items()}
            with contextlib.nullcontext() if turn == len(parts) - 1 else model.no_sync():
                (self.loss_sum(model, rows)[0] * ctx.world_size / total).backward()


class Buggy(Clean):
    keep = True


EXPECT = dict(
    right=[
        r"(?i)act[12]|activation|silu",
        r"(?i)backward|derivative|adjoint|gradient (of|that|it)|hands? (back|on)|double|second",
    ],
    place=[r"(?i)silu|act[12]|activation"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong|differs)|goes wrong in the forward",
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|no_sync.{0,40}(wrong|missing|too (early|late))",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)(weight|scale) of the (force|energy)",
    ],
)
WHY = (
    "Energies and forces (the forward and the first derivative of Silu) are right on all ranks, rows and micro-batches. The backward of Silu is itself differentiated, since the force term contains autograd.grad(..., "
    "create_graph=True). With keep the Function saves sigmoid(x), made inside forward without a graph, so the double backward sees gate as a constant: of the second derivative gate * (1 - gate) * (2 + x * (1 - 2 * gate)) only gate * "
    "(1 - gate) is left. The energy term's gradient is right, the force term's is wrong through the dependence of the slopes on the pre-activations of act1 and act2: inner.weight, inner.bias, middle.bias and middle.weight are wrong; "
    "outer.weight and outer.bias, which do not sit before an activation, are right. The same on all ranks (after DDP's average) and in all micro-batches. Divisor 8, no_sync, reduction and the weights of the terms are right. Fix: save "
    "x and compute sigmoid(x) again in backward (or return the gate as an output)."
)
