"""Energies of small crystals with a message passing network whose edges are dealt out over three ranks (graph parallel): every rank computes the messages of its edges, the sums per atom are all-reduced, atoms are replicated. Two
micro-batches. An edge that leaves the unit cell has an integer shift, and the vector of the edge is position of the receiver minus position of the sender plus shift times lattice.

The bug: the rank's edge vectors take the lattice vectors from the columns of the cell; they are its rows. Edges inside the cell (shift zero) are right. Known from hackingmaterials/amset PR 36 (lattice transposition missing), roitberg-group/
torchani-amber PR 147 and atomistic-machine-learning/schnetpack PR 670 (shifts under periodic boundaries).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

TOPOLOGY = {"pools": {"train": {"axes": {"gp": 3}}}}
KINDS, ATOMS, EDGES, WIDTH, RADII, ROWS = 4, 5, 13, 6, 5, 7
SHARES = [(0, 5), (5, 9), (9, 13)]
TURNS = [(0, 4), (4, 7)]


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def edge_vectors(rows):
    def at(ends):
        return rows["places"].gather(1, ends[..., None].expand(-1, -1, 3))

    cell = rows["cell"]
    return at(rows["to"]) - at(rows["from"]) + rows["shift"].to(cell.dtype) @ cell


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.update = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Sequential(nn.Linear(RADII, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h, radial, rows, group):
        source = self.source(h)
        if group is not None:
            source = Enter.apply(source, group)
        ends = rows["from"][..., None].expand(-1, -1, WIDTH)
        message = source.gather(1, ends) * self.filter(radial)
        to = rows["to"][..., None].expand(-1, -1, WIDTH)
        total = torch.zeros_like(h).scatter_add(1, to, message)
        if group is not None:
            total = Total.apply(total, group)
        return h + F.silu(self.update(total))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, rows, vectors, group=None):
        centres = torch.arange(RADII).to(vectors) * 0.7 + 0.4
        radial = torch.exp(-((vectors.norm(dim=-1)[..., None] - centres) ** 2))
        h = self.kinds(rows["kind"])
        for layer in self.layers:
            h = layer(h, radial, rows, group)
        return self.energy(h).sum((1, 2))


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Net()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        cell = 1.6 * torch.eye(3) + 0.5 * torch.randn(ROWS, 3, 3, generator=g)
        ends = torch.randint(ATOMS, (ROWS, EDGES), generator=g)
        step = 1 + torch.randint(ATOMS - 1, (ROWS, EDGES), generator=g)
        shift = torch.randint(-1, 2, (ROWS, EDGES, 3), generator=g)
        inside = torch.rand(ROWS, EDGES, 1, generator=g) < 0.5
        return {
            "places": torch.rand(ROWS, ATOMS, 3, generator=g) @ cell,
            "cell": cell,
            "kind": torch.randint(KINDS, (ROWS, ATOMS), generator=g),
            "from": ends,
            "to": (ends + step) % ATOMS,
            "shift": shift.masked_fill(inside, 0),
            "energy": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        energy = model(rows, edge_vectors(rows))
        return F.mse_loss(energy, rows["energy"], reduction="sum"), len(energy)

    def vectors(self, rows):
        return edge_vectors(rows)

    def step(self, model, batch, ctx):
        group, (first, last) = ctx.group("gp"), SHARES[ctx.rank]
        for low, high in TURNS:
            rows = {k: v[low:high] for k, v in batch.items()}
            for name in ("from", "to", "shift"):
                rows[name] = rows[name][:, first:last]
            energy = model(rows, self.vectors(rows), group)
            (F.mse_loss(energy, rows["energy"], reduction="sum") / ROWS).backward()
        for layer in model.layers:
            for p in layer.filter.parameters():
                dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def vectors(self, rows):
        row = torch.arange(len(rows["places"]))[:, None]
        apart = rows["places"][row, rows["to"]] - rows["places"][row, rows["from"]]
        cell = rows["cell"]
        return apart + torch.einsum("bij,bej->bei", cell, rows["shift"].to(cell.dtype))


EXPECT = dict(
    right=[
        r"(?i)vector|edge|cell|lattice|shift|distance|radial|\bfilter|geometry",
        r"(?i)forward|input|transpos|column|value|other (data|input|argument)|wrong dimension|layout|index",
    ],
    place=[r"(?i)vector|edge|cell|lattice|shift|distance|radial|filter"],
    wrong=[
        r"(?i)not (been )?(all.?)?reduced|(reduced|summed|counted) (twice|again)|reduced over",
        r"(?i)wrong divisor|mean of means|divi(ded|des) by (its|their) own|factor of (1/)?[0-9]",
        r"(?i)micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|from micro.?batch|state left",
        r"(?i)only (on )?rank [012]\b|rank [012] alone",
        r"(?i)backward of .{0,30} is wrong|wrong backward|backward formula|adjoint",
        r"(?i)edges? (is|are) (lost|dropped|counted twice)|overlap|targets? .{0,10}(is|are) wrong|recomput",
    ],
)
WHY = (
    "On all three ranks, in both micro-batches, the vectors of edges with a shift are wrong: the rows of `cell` are the lattice vectors, so the displacement is shift @ cell, and Buggy.vectors contracts the shift with the second index "
    "of cell (cell @ shift, the transpose of the cell). Edges with shift zero are right. So the distances, the radial features that go into every layer's filter, the messages, all energies and thereby all gradients are wrong; the forward goes "
    "wrong at its input (first seen in layers.0.filter). The share of edges per rank, the all-reduce of the sums, the copies, the reduction of the filter gradients and the divisor 7 are right. Fix: shift @ cell (einsum 'bij,bei->bej')."
)
