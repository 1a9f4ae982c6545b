"""Interatomic potential with graph parallelism on three ranks: every rank holds the atoms lo .. hi of all molecules of a micro-batch (2, 2 and 3 of 7 atoms), makes their features, gathers the features of all atoms and passes
messages to its own. The loss is on energies and forces; the forces are minus the gradient of the energy by the positions, made with create_graph, so that the loss is differentiated through that gradient. Two micro-batches (3
and 2 molecules).

The bug: the backward of the gather sums the gradients with a plain dist.all_reduce in place. As a first derivative that is right (the forces are), but autograd does not record it: when the forces are differentiated, the sum
over the ranks is taken for the identity. As asked in facebookresearch/fairchem issue 1193 (how does gp_utils track second derivatives: _reduce in the backward of its Function does not).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"gp": 3}}}}
ROWS, ATOMS, SPECIES, WIDTH, RADIAL = 5, 7, 4, 6, 4
OWN = [(0, 2), (2, 4), (4, 7)]


class SumOfRanks(torch.autograd.Function):
    """Sum over the ranks; its transpose is the sum over the ranks again, and so on."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return SumOfRanks.apply(grad, ctx.group), None


class GatherAtoms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, recorded):
        ctx.group, ctx.recorded = group, recorded
        rank = dist.get_rank(group)
        full = x.new_zeros(x.shape[0], ATOMS, x.shape[2])
        full[:, slice(*OWN[rank])] = x
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(ctx, grad):
        if ctx.recorded:
            grad = SumOfRanks.apply(grad, ctx.group)
        else:
            grad = grad.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(grad, group=ctx.group)
        return grad[:, slice(*OWN[dist.get_rank(ctx.group)])], None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SPECIES, WIDTH)
        self.filter1, self.filter2 = nn.Linear(RADIAL, WIDTH), nn.Linear(RADIAL, WIDTH)
        self.mix1, self.mix2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.readout = nn.Linear(WIDTH, 1)
        self.group, self.recorded = None, True

    def forward(self, z, pos, low=0, high=ATOMS):
        d2 = (pos[:, low:high, None] - pos[:, None]).square().sum(-1, keepdim=True)
        width = torch.arange(1, RADIAL + 1, device=pos.device) * 0.3
        others = 1 - torch.eye(ATOMS, dtype=pos.dtype)[low:high, :, None]
        basis = torch.exp(-d2 * width)
        h = self.embed(z)
        message = (self.filter1(basis) * others * h[:, None]).sum(2)
        own = h[:, low:high] + F.silu(self.mix1(message))
        h = own if self.group is None else GatherAtoms.apply(own, self.group, self.recorded)
        message = (self.filter2(basis) * others * h[:, None]).sum(2)
        return self.readout(own + F.silu(self.mix2(message))).sum((1, 2))


class Clean:
    recorded = True

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "z": torch.randint(SPECIES, (ROWS, ATOMS), generator=g),
            "pos": torch.randn(ROWS, ATOMS, 3, generator=g),
            "energy": torch.randn(ROWS, generator=g),
            "force": torch.randn(ROWS, ATOMS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        with torch.enable_grad():
            pos = rows["pos"].detach().clone().requires_grad_()
            energy = model(rows["z"], pos)
            slope = torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        loss = (energy - rows["energy"]).square().sum() + (slope + rows["force"]).square().sum()
        return loss, len(rows["z"])

    def distribute(self, model, ctx):
        model.group, model.recorded = ctx.group("gp"), self.recorded
        return model

    def step(self, model, batch, ctx):
        group = ctx.group("gp")
        low, high = OWN[ctx.rank]
        for part in torch.arange(ROWS).split(3):
            pos = batch["pos"][part].detach().clone().requires_grad_()
            partial = model(batch["z"][part], pos, low, high)
            slope = torch.autograd.grad(partial.sum(), pos, create_graph=True)[0]
            slope = SumOfRanks.apply(slope, group)[:, low:high]
            energy = SumOfRanks.apply(partial, group)
            loss = (slope + batch["force"][part, low:high]).square().sum()
            loss = loss + (energy - batch["energy"][part]).square().sum() / ctx.world_size
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    recorded = False


EXPECT = dict(
    right=[
        r"(?i)gather|all.?reduce|collective|sum over (the |all )?ranks|cross.?rank",
        r"(?i)second|double|twice.differenti|higher|create_graph|derivative of (a|"
        r"the) (derivative|gradient)|"
        r"gradient of (a|the) (gradient|derivative)|forces?|not (recorded|tracked|"
        r"differentiable)|detach",
    ],
    place=[r"(?i)GatherAtoms|gather|mix1|filter2|backward"],
    wrong=[
        r"(?i)forward (is wrong|goes wrong)|goes wrong in the forward",
        r"(?i)parameter.{0,30}(never|not) (been )?(all.?)?reduced|(reduced|summed) (twice|again)",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[23]\b",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|never read|overwritten)",
        r"(?i)only (on )?rank \d|rank \d alone",
        r"(?i)first.order .{0,30}wrong|forces (are|is) wrong",
    ],
)
WHY = (
    "Energies and forces are right on all ranks: the first derivative through GatherAtoms (sum over the ranks, own slice) has the right value. But the sum is made in place by dist.all_reduce on a clone, and autograd records "
    "the clone only. When the force loss is differentiated, the cotangent of the own slice is sent to the own rank's graph of dE/dh alone instead of being summed over the ranks, so the second-order terms between atoms of "
    "different ranks are missing. Wrong in direction, on all ranks equally after the all-reduce, for all rows and micro-batches: filter2, mix2, readout.weight, and mix1, filter1, embed upstream; readout.bias is right (only "
    "the energy loss reaches it). The energy part of the loss is right. Fix: the backward calls a differentiable sum (SumOfRanks.apply), as torch.distributed.nn.functional does."
)
