"""A normalising flow with checkerboard couplings on small lattices whose rows are cut into strips
over 2 ranks (3 and 2 rows); a global mean of the visible sites conditions each coupling.

The bug: the checkerboard is made from the rows of the own strip, counted from zero. The second
strip begins at row 3, an odd number, so its colours are exchanged: sites that should be seen are
transformed and the other way round. After lattice field flows and RealNVP code (`mask = (i + j)
% 2` with i from arange of the local height) under domain decomposition, where the fault hides as
long as strips have even heights.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnf
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"strip": 2}}}}
HEIGHT, WIDTH, COUPLINGS = 5, 5, 3


def colours(first_row, rows, parity):
    i = torch.arange(first_row, first_row + rows).unsqueeze(1)
    j = torch.arange(WIDTH)
    return (i + j + parity) % 2


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Conv2d(1, 6, (1, 3), padding=(0, 1))
        self.mean_in = nn.Linear(1, 6)
        self.scale_shift = nn.Conv2d(6, 2, 1)

    def forward(self, x, seen, mean_of):
        visible = x * seen
        context = self.mean_in(mean_of(visible)).unsqueeze(-1).unsqueeze(-1)
        scale, shift = self.scale_shift(
            torch.tanh(self.look(visible.unsqueeze(1)) + context)
        ).unbind(1)
        scale = torch.tanh(scale) * (1 - seen)
        return visible + (1 - seen) * (x * scale.exp() + shift), scale.sum((1, 2))


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(COUPLINGS))
        self.log_mass = nn.Parameter(torch.tensor(0.1))

    def energy(self, x, seen_of, mean_of):
        logdet = 0
        for k, coupling in enumerate(self.couplings):
            x, more = coupling(x, seen_of(k).to(x.dtype), mean_of)
            logdet = logdet + more
        prior = (0.5 * x.square() * self.log_mass.exp() - 0.5 * self.log_mass).sum((1, 2))
        return prior - logdet


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed + 71)
        return Flow()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 72)
        return {"field": torch.randn(7, HEIGHT, WIDTH, generator=g) * 1.3}

    def loss_sum(self, model, rows):
        field = rows["field"]
        loss = model.energy(
            field, lambda k: colours(0, HEIGHT, k), lambda v: v.mean((1, 2)).unsqueeze(1)
        )
        return loss.sum(), len(field)

    def strip_colours(self, lo, hi, k):
        return colours(lo, hi - lo, k)

    def step(self, model, batch, ctx):
        group = ctx.group("strip")
        lo, hi = [(0, 3), (3, 5)][ctx.rank]

        def mean_of(visible):
            return dnf.all_reduce(visible.sum((1, 2)).unsqueeze(1), group=group) / (HEIGHT * WIDTH)

        total = len(batch["field"])
        for field in batch["field"].split(4):
            loss = model.energy(field[:, lo:hi], lambda k: self.strip_colours(lo, hi, k), mean_of)
            (loss.sum() / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)


class Buggy(Clean):
    def strip_colours(self, lo, hi, k):
        return colours(0, hi - lo, k)


EXPECT = dict(
    right=[
        r"checkerboard|parity|colou?r|mask|seen|even|odd",
        r"strip|rank|shard|local|own rows|global row|row offset|second",
        (
            r"offset|start|begin|count|local|own|flip|invert|exchang|swap|opposite|complement|"
            r"zero|origin|global"
        ),
    ],
    place=[r"strip_colours|colours", r"mask|checkerboard", r"coupling", r"seen", r"parity"],
    wrong=[
        r"halo|neighbou?r(ing)? rows?",
        r"mean.*(local|own strip)",
        r"log.?det(erminant)? (is )?(missing|not|local|twice)",
        r"divided|averag",
        r"backward of (the )?all.?reduce",
    ],
)

WHY = """The strip's checkerboard counts rows from 0 instead of from the strip's first row. Strip 1
starts at row 3, so on rank 1 each coupling transforms the sites it should look at and
looks at those it should transform; rank 0 makes the right mask, though the global mean it
is given is of the wrong sites of strip 1. The gradients of all couplings and of log_mass
are wrong; the sums over ranks are fine. A right cause says that the checkerboard mask of
the later strip has the wrong parity, being made from local row numbers. The fix: add the
strip's first row."""
