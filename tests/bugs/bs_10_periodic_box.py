"""Energy model of atoms in a periodic box, ten atoms dealt out over three ranks (4, 3, 3), five boxes in two micro-batches. Two rounds of messages between all pairs, with weights made of the nearest image's distance; in the
second round the features of the other ranks' atoms are gathered. Energies are sums over atoms, summed over the ranks; the loss is the squared error of the energy.

The bug: displacements to the gathered atoms are wrapped by torch.fmod(d, box) instead of taking the nearest image; atoms lie in the box, so fmod does nothing, and pairs across the wall are taken for far apart.
After minimum-image reports in domain-decomposed potentials (remainder/fmod in place of d - box * round(d / box)).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"domain": 3}}}}
ATOMS, WIDTH, SPECIES, BOX, ROWS = 10, 6, 3, 4.0, 5


def nearest_image(d):
    return d - BOX * torch.round(d / BOX)


class Potential(nn.Module):
    def __init__(self):
        super().__init__()
        self.species = nn.Embedding(SPECIES, WIDTH)
        self.radial = nn.ModuleList(nn.Linear(2, WIDTH) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.energy = nn.Linear(WIDTH, 1)

    def round(self, n, h, everyone, d):
        """h: own atoms, everyone: all atoms' features, d: displacements [rows, own, all, 3]."""
        r2 = d.square().sum(-1, keepdim=True)
        w = torch.tanh(self.radial[n](torch.cat([torch.exp(-r2), torch.exp(-r2 / 4)], -1)))
        return h + torch.tanh(self.update[n]((w * everyone[:, None]).sum(2) / 3))

    def first(self, species, own):
        h = self.species(species)
        return h[:, own], h

    def last(self, h):
        return self.energy(h)[..., 0].sum(1)


class GatherAtoms(torch.autograd.Function):
    """All atoms' features on each rank; gradients of all ranks for the own atoms are summed."""

    @staticmethod
    def forward(fctx, own, lo, hi, group):
        fctx.place, fctx.group = slice(lo, hi), group
        full = own.new_zeros(own.shape[0], ATOMS, own.shape[2])
        full[:, lo:hi] = own
        dist.all_reduce(full, group=group)
        return full

    @staticmethod
    def backward(fctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=fctx.group)
        return grad[:, fctx.place], None, None, None


class SumForAll(torch.autograd.Function):
    @staticmethod
    def forward(fctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(fctx, grad):
        return grad, None


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Potential()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        return {
            "species": torch.randint(SPECIES, (ROWS, ATOMS), generator=g),
            "x": BOX * torch.rand(ROWS, ATOMS, 3, generator=g),
            "e": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        own = slice(0, ATOMS)
        h, everyone = model.first(rows["species"], own)
        d = nearest_image(rows["x"][:, :, None] - rows["x"][:, None])
        h = model.round(0, h, everyone, d)
        h = model.round(1, h, h, d)
        return (model.last(h) - rows["e"]).square().sum(), len(h)

    def remote_displacements(self, x, own):
        return nearest_image(x[:, own, None] - x[:, None])

    def energies(self, model, part, lo, hi, group):
        x, own = part["x"], slice(lo, hi)
        h, everyone = model.first(part["species"], own)
        h = model.round(0, h, everyone, nearest_image(x[:, own, None] - x[:, None]))
        everyone = GatherAtoms.apply(h, lo, hi, group)
        h = model.round(1, h, everyone, self.remote_displacements(x, own))
        return SumForAll.apply(model.last(h), group)

    def step(self, model, batch, ctx):
        group = ctx.group("domain")
        own = torch.arange(ATOMS).tensor_split(ctx.world_size)[ctx.rank]
        lo, hi = int(own[0]), int(own[-1]) + 1
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: v.tensor_split(2)[n] for k, v in batch.items()}
            loss = (self.energies(model, part, lo, hi, group) - part["e"]).square().sum()
            (loss / ROWS).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def remote_displacements(self, x, own):
        return torch.fmod(x[:, own, None] - x[:, None], BOX)


EXPECT = dict(
    right=[
        r"displacement|distance|periodic|image|wrap|fmod|box|geometr|round\(",
        r"fmod|nearest|minimum|image|wrap|periodic|wall|across|round\(|remainder",
    ],
    place=[
        r"remote_displacements",
        r"fmod",
        r"radial|second round|round\(1|round 1",
        r"energies|\bd\b",
    ],
    wrong=[
        r"(not|never) reduced|reduced twice|missing (all.?)?reduc|counted (twice|three|3) times|wrong group",
        r"GatherAtoms.{0,60}(wrong|missing)|SumForAll.{0,40}(wrong|missing)|backward.{0,40}(wrong|not the adjoint)",
        r"micro.?batch.{0,30}(lost|dropped|overwritten)|mean of means|divisor|halo.{0,20}(missing|zero)",
    ],
)
WHY = (
    "In the second round of messages each rank wraps its displacements by fmod, which leaves any |d| below the box length as it is, so that pairs farther apart than half the box along an axis are not taken at their nearest image. "
    "The energies are wrong on all three ranks in both micro-batches, hence all gradients, those of radial.1 most; the first round, the gather, the energy's sum and the final reduction are right. "
    "A right cause says that the displacements (distances) in the second round are not the nearest image's. Fix: d - BOX * round(d / BOX)."
)
