"""Force matching of a small learnt interatomic potential with the atoms divided over three ranks (4, 3 and 2 atoms): every rank computes the energies of its own atoms from the positions of all, and the forces are minus
the derivative of the total energy. Each rank compares the forces on its own atoms with the reference forces; two micro-batches of configurations, parameter gradients summed over the ranks.

The bug: a rank takes the derivative of the energies of its own atoms alone as the force on its own atoms; the energies of the other ranks' atoms depend on these positions too, and what they give
to the force (the forces on ghost atoms, LAMMPS' reverse_comm) never comes back to the owner. After reports on NequIP/MACE/DeePMD with domain decomposition ("forces wrong with more than one rank, newton off").
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"domain": 3}}}}
ATOMS, ROWS, BASIS, WIDTH = 9, 5, 6, 7
OWNED = ((0, 4), (4, 7), (7, 9))


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.radial = nn.Sequential(nn.Linear(BASIS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.atomic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))
        self.register_buffer("centres", torch.linspace(0.3, 2.5, BASIS))

    def forward(self, positions, lo, hi):
        """The energies of atoms lo to hi, each with all the other atoms as neighbours."""
        difference = positions[:, lo:hi, None] - positions[:, None]
        itself = torch.eye(ATOMS, dtype=positions.dtype, device=positions.device)[lo:hi]
        distance = (difference.square().sum(-1) + itself).sqrt()
        basis = torch.exp(-2 * (distance[..., None] - self.centres).square())
        message = self.radial(basis) * (1 - itself)[..., None]
        return self.atomic(message.sum(2)).squeeze(-1)


class ReverseComm(torch.autograd.Function):
    """Sums over the ranks what each one's energies exert on every atom; returns the rows of the own atoms."""

    @staticmethod
    def forward(fctx, exerted, lo, hi, group):
        fctx.range, fctx.group = (lo, hi), group
        total = exerted.clone()
        dist.all_reduce(total, group=group)
        return total[:, lo:hi].clone()

    @staticmethod
    def backward(fctx, grad):
        lo, hi = fctx.range
        full = grad.new_zeros(grad.shape[0], ATOMS, 3)
        full[:, lo:hi] = grad
        dist.all_reduce(full, group=fctx.group)
        return full, None, None, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Potential()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "positions": 1.2 * torch.randn(ROWS, ATOMS, 3, generator=g),
            "forces": torch.randn(ROWS, ATOMS, 3, generator=g),
        }

    def loss_sum(self, model, rows):
        x = rows["positions"].detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x, 0, ATOMS).sum(), x, create_graph=True)
        return (rows["forces"] + slope).square().sum(), len(x)

    def own_forces(self, model, positions, lo, hi, ctx):
        x = positions.detach().clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x, lo, hi).sum(), x, create_graph=True)
        return ReverseComm.apply(-slope, lo, hi, ctx.group("domain"))

    def step(self, model, batch, ctx):
        lo, hi = OWNED[ctx.rank]
        model.zero_grad()
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            predicted = self.own_forces(model, part["positions"], lo, hi, ctx)
            loss = (part["forces"][:, lo:hi] - predicted).square().sum()
            (loss / ROWS).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("domain"))


class Buggy(Clean):
    def own_forces(self, model, positions, lo, hi, ctx):
        x = positions.detach().clone().requires_grad_()
        energy = model(x, lo, hi).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return -slope[:, lo:hi]


EXPECT = dict(
    right=[
        r"force|own_forces|slope|exert",
        r"reverse.?comm|(miss|lack|omit|no |not |never|without|skip|fewer|absent|dropp|left out).{0,80}(reduc|sum|collective|exchange|communicat|contribution|comes? back)|(reduc|sum|collective|exchange|communicat|contribution).{0,80}(miss|lack|omit|not |never|absent|dropp|left out)|(own|local) (energ|atoms|part).{0,40}(only|alone)|only .{0,30}(own|local)",
    ],
    place=[r"own_forces", r"ReverseComm", r"slope", r"predicted|forces?\b"],
    wrong=[
        r"parameters?.{0,30}(not reduced|never reduced|reduced twice)|gradient all.?reduce is missing",
        r"only the last micro.?batch|divisor|mean of means|wrong group",
        r"reduced (twice|again)|counted (twice|several|3) times",
    ],
)
WHY = (
    "The force on an atom is minus the derivative of the energy of all atoms, also of those on the other ranks; the step's own_forces differentiates only the energies of the rank's own atoms, and keeps the rows "
    "of its own atoms, without the sum over the ranks (ReverseComm) of what each exerts on every atom. The predicted forces are wrong on all three ranks and in both micro-batches, and with them the loss and all parameter "
    "gradients; the final reduction of the parameter gradients is right. A right cause says that the exchange/sum of the forces (the contributions of the other ranks' energies) is missing in own_forces. Fix: "
    "ReverseComm.apply(-slope, ...)."
)
