"""A machine-learned interatomic potential: energies and, by autograd of the energy with respect to the positions, forces; molecules of unlike size, padded. DDP
of four; the energy term is a mean over molecules, the force term over all components of all atoms.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 4}}}}
ATOMS = [5, 3, 6, 2, 4, 6, 3, 3, 5]
ROWS, MOST, KINDS, WIDTH, FORCES = len(ATOMS), max(ATOMS), 3, 8, 100.0


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.alone = nn.Embedding(KINDS, WIDTH), nn.Embedding(KINDS, 1)
        self.filter = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.update = nn.Linear(WIDTH, WIDTH)
        self.atom = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, z, pos, mask):
        eye = torch.eye(pos.shape[1], dtype=pos.dtype)
        d = ((pos[:, :, None] - pos[:, None]).square().sum(-1) + eye).sqrt()
        pair = (mask[:, :, None] & mask[:, None] & (eye == 0)).to(pos.dtype)
        radial = torch.exp(-(d[..., None] - torch.arange(1, 6, dtype=pos.dtype) * 0.6).square())
        h = self.kind(z)
        h = h + torch.tanh(self.update((pair[..., None] * self.filter(radial) * h[:, None]).sum(2)))
        return ((self.atom(h) + self.alone(z)).squeeze(-1) * mask).sum(-1)


def two_sums(model, rows):
    """The sums of squared errors of energies and of force components."""
    pos = rows["pos"].detach().clone().requires_grad_()
    energy = model(rows["z"], pos, rows["mask"])
    force = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
    wrong = (force - rows["force"]).square() * rows["mask"][..., None]
    return F.mse_loss(energy, rows["energy"], reduction="sum"), FORCES * wrong.sum()


def components(rows):
    return 3 * rows["mask"].sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Potential()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "z": torch.randint(KINDS, (ROWS, MOST), generator=g),
            "pos": torch.randn(ROWS, MOST, 3, generator=g) * 1.3,
            "mask": torch.arange(MOST) < torch.tensor(ATOMS)[:, None],
            "energy": torch.randn(ROWS, generator=g) * 2,
            "force": torch.randn(ROWS, MOST, 3, generator=g),
        }

    def terms(self):
        return {
            "energy": lambda model, rows: (two_sums(model, rows)[0], len(rows["z"])),
            "forces": lambda model, rows: (two_sums(model, rows)[1], components(rows)),
        }

    def loss_sum(self, model, rows):
        energy, forces = two_sums(model, rows)
        return energy + forces * ROWS / (3 * sum(ATOMS)), len(rows["z"])

    def distribute(self, model, ctx):
        return DistributedDataParallel(model)

    def force_mean(self, forces, batch, mine, ctx):
        return forces * ctx.world_size / components(batch)

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        energy, forces = two_sums(model, mine)
        loss = energy * ctx.world_size / len(batch["z"])
        (loss + self.force_mean(forces, batch, mine, ctx)).backward()


class Buggy(Clean):
    def force_mean(self, forces, batch, mine, ctx):
        return forces / components(mine)


EXPECT = dict(
    right=[
        r"force",
        r"own|local|each rank|per rank|rank'?s|factor|divi|denominator|count|mean of|normalis|weigh",
    ],
    place=[r"force|denominator|divi|count"],
    wrong=[
        r"energy\S* (term )?.{0,20}(is wrong|divided by (its|their|the rank'?s) own|own count)",
        r"(never|not) (been )?(all.?)?reduced|missing all.?reduc",
        r"(counted|reduced|summed|added) (twice|again)",
        r"forward (is wrong|goes wrong)|goes wrong in the forward",
        r"force\S* (term )?(is |are )?(lost|missing|detached)",
        r"alone\S* (is|are) wrong|rows? .{0,20}(never read|read twice)",
    ],
)
WHY = (
    "The force term is divided by the rank's own number of force components and averaged by DDP: a mean of four ranks' means. The ranks have 3, 2, 2 and 2 molecules with 14, 6, 9 and 8 atoms of "
    "37, so their force errors enter with 37/56, 37/24, 37/36 and 37/32 of what they should. The energy term, over all molecules, is right, and so are alone.weight and atom.2.bias, which no force reaches. "
    "Wrong on all ranks alike: kind, filter, update, atom, as far as forces reach them. Right is the sum over all ranks' components, times the ranks for DDP's average."
)
