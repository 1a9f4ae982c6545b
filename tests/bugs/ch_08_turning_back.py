"""A directional message passing network on molecules (angles between bonds), its triplets dealt out
over graph 2, molecules over dp 2.

A message belongs to a directed bond j -> i and hears, from all bonds k -> j that end where it
begins, through a basis of the angle between them. Each rank of the graph axis works on some of
the triplets; the sums over triplets are added up.

The bug: the triplets are found by comparing bonds instead of atoms (a bond must not be its own
neighbour), so the bond i -> j, from which j -> i would turn straight back (k = i), is among them.
After triplet constructions of DimeNet ports without torch_sparse, which need ``idx_i != idx_k``.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 2, "graph": 2}}}}

ROWS, ATOMS, KINDS, DIM, BASIS, CUTOFF = 7, 5, 4, 6, 3, 2.2


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def triplets(src, dst):
    meets = dst[:, None] == src[None, :]
    return (meets & (src[:, None] != dst[None, :])).nonzero().unbind(1)


def bond_pairs(src, dst):
    bonds = torch.arange(src.numel())
    meets = dst[:, None] == src[None, :]
    return (meets & (bonds[:, None] != bonds[None, :])).nonzero().unbind(1)


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.angle = nn.Linear(BASIS, DIM, bias=False)
        self.incoming = nn.Linear(DIM, DIM, bias=False)
        self.update = nn.Linear(DIM, DIM)

    def forward(self, message, cosine, source, target, group):
        heard = message if group is None else Enter.apply(message, group)
        basis = torch.stack([cosine, 2 * cosine**2 - 1, 4 * cosine**3 - 3 * cosine], -1)
        heard = self.incoming(heard)[source] * self.angle(basis)
        total = torch.zeros_like(message).index_add(0, target, heard)
        if group is not None:
            total = Leave.apply(total, group)
        return message + torch.tanh(self.update(total))


class Molecules(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = nn.Embedding(KINDS, DIM)
        self.bond = nn.Linear(2 * DIM + 1, DIM)
        self.interactions = nn.ModuleList(Interaction() for _ in range(2))
        self.energy = nn.Linear(DIM, 1)
        self.group, self.find = None, triplets

    def forward(self, kinds, places):
        rows = kinds.shape[0]
        near = torch.cdist(places, places) < CUTOFF
        near = near & ~torch.eye(ATOMS, dtype=torch.bool)
        row, a, b = near.nonzero().unbind(1)
        src, dst = row * ATOMS + a, row * ATOMS + b
        flat, z = places.reshape(-1, 3), self.kinds(kinds.flatten())
        way = flat[dst] - flat[src]
        far = way.norm(dim=-1, keepdim=True)
        message = torch.tanh(self.bond(torch.cat([z[src], z[dst], far], -1)))
        source, target = self.find(src, dst)
        if self.group is not None:
            share, world = dist.get_rank(self.group), dist.get_world_size(self.group)
            source, target = (torch.tensor_split(v, world)[share] for v in (source, target))
        unit = way / far
        cosine = -(unit[source] * unit[target]).sum(-1)
        for interaction in self.interactions:
            message = interaction(message, cosine, source, target, self.group)
        energy = self.energy(message).squeeze(-1)
        return energy.new_zeros(rows).index_add(0, row, energy)


class Clean:
    find = staticmethod(triplets)

    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(91 + self.seed)
        return Molecules()

    def batch(self):
        g = torch.Generator().manual_seed(92 + self.seed)
        return {
            "kinds": torch.randint(0, KINDS, (ROWS, ATOMS), generator=g),
            "places": torch.randn(ROWS, ATOMS, 3, generator=g),
            "energy": torch.randn(ROWS, generator=g),
        }

    def loss_sum(self, model, rows):
        energy = model(rows["kinds"], rows["places"])
        return (energy - rows["energy"]).square().sum(), energy.shape[0]

    def distribute(self, model, ctx):
        model.group, model.find = ctx.group("graph"), self.find
        return model

    def step(self, model, batch, ctx):
        mine = {k: torch.tensor_split(v, 2)[ctx.coords["dp"]] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / ROWS).backward()
        for name, parameter in model.named_parameters():
            dist.all_reduce(parameter.grad, group=ctx.group("dp"))
            if "angle" in name or "incoming" in name:
                dist.all_reduce(parameter.grad, group=ctx.group("graph"))


class Buggy(Clean):
    find = staticmethod(bond_pairs)


EXPECT = dict(
    right=[
        r"triplet|pair|angle|neighbou?r|bond|edge|message",
        (
            r"back(track\w*|ward edge| edge|[- ]?turn\w*)|revers|k ?(==|=|is|equals) ?i\b|"
            r"same atom|"
            r"turn(s|ing|ed)? (straight |right )?(back|round|around)|i ?-> ?j|idx_i|zero angle|"
            r"(opposite|returning) (bond|edge|message|direct)|"
            r"(back|return\w*) to (its|the) (source|sender|origin)"
        ),
    ],
    place=[
        r"bond_pairs",
        r"\btriplets\b",
        r"\bfind\b",
        r"Molecules\.forward",
        r"bonds\[:, None\]",
        r"Interaction",
    ],
    wrong=[
        r"(not|never|missing|without).{0,40}(all-?)?reduc|summed (twice|again)",
        r"sign of (the )?cos|cosine.{0,20}sign|wrong angle",
        r"(across|between|of other|different) molecules",
        r"self[- ]loop|divis(or|ion)|normali[sz]",
    ],
)

WHY = (
    "A triplet k -> j -> i must have k != i. bond_pairs only asks that the two bonds are not the "
    "same bond, which bonds that meet in j never are, so every bond j -> i also hears its own "
    "reverse i -> j, at an angle of zero. The sums over triplets contain one term too many per "
    "bond, which changes the messages and with them every gradient: angle and incoming get extra "
    "terms, update, bond, kinds and energy follow. The sharing of triplets, the sums over graph "
    "and dp and the division are right. A right cause says that backtracking (reverse) bonds are "
    "not left out of the triplets. The fix is src[:, None] != dst[None, :]."
)
