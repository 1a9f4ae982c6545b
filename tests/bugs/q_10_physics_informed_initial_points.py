"""A physics-informed network for the heat equation under DDP of three: the collocation points are spread over the ranks, the few boundary
points are on all of them, the initial points on rank 0 only. DDP takes the mean of the ranks. After reports on averaged gradients of terms
that only some ranks have: the term of rank 0 is not multiplied by the number of ranks.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
INSIDE, EDGE, START, WIDTH = 11, 4, 5, 12
POINTS, ALPHA = INSIDE + EDGE + START, 0.1


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, points):
        return self.out(self.second(self.first(points).tanh()).tanh())[:, 0]


def residuals(model, rows):
    """Squares: of the equation at all points, and of the distance to the prescribed value."""
    points = rows["points"].detach().requires_grad_()
    u = model(points)
    (du,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    (dxx,) = torch.autograd.grad(du[:, 1].sum(), points, create_graph=True)
    return (du[:, 0] - ALPHA * dxx[:, 1]).square(), (u - rows["value"]).square()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed
        self.terms = {
            "equation": lambda model, rows: self.term(model, rows, 0, 0, 1.0),
            "boundary": lambda model, rows: self.term(model, rows, 1, 1, 3.0),
            "initial": lambda model, rows: self.term(model, rows, 2, 1, 5.0),
        }

    def build(self):
        torch.manual_seed(self.seed)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        kind = torch.tensor([0] * INSIDE + [1] * EDGE + [2] * START)
        points = torch.rand(POINTS, 2, generator=g) * 2
        points[kind == 1, 1] = torch.randint(2, (EDGE,), generator=g) * 2.0
        points[kind == 2, 0] = 0
        value = torch.where(kind == 2, (points[:, 1] * 1.7).sin() * 2, torch.zeros(POINTS))
        return {"points": points, "kind": kind, "value": value}

    @staticmethod
    def term(model, rows, kind, which, weight):
        of = rows["kind"] == kind
        return weight * residuals(model, rows)[which][of].sum(), of.sum()

    def loss_sum(self, model, rows):
        return self.terms["equation"](model, rows)

    def distribute(self, model, ctx):
        return DistributedDataParallel(model, process_group=ctx.group("dp"))

    def ranks_of(self, kind, n):
        """What a term is multiplied by against the mean over the ranks."""
        return 1 if kind == 1 else n

    def step(self, model, batch, ctx):
        n, me = ctx.axes["dp"], ctx.coords["dp"]
        inside, edge, start = ((batch["kind"] == k).nonzero()[:, 0] for k in range(3))
        at = torch.cat([inside.tensor_split(n)[me], edge, start if me == 0 else start[:0]])
        rows = {k: v[at] for k, v in batch.items()}
        equation, value = residuals(model, rows)
        loss = 0
        for kind, each, weight in ((0, equation, 1.0), (1, value, 3.0), (2, value, 5.0)):
            total = weight * each[rows["kind"] == kind].sum()
            loss = loss + total * self.ranks_of(kind, n) / (batch["kind"] == kind).sum()
        loss.backward()


class Buggy(Clean):
    def ranks_of(self, kind, n):
        return n if kind == 0 else 1


EXPECT = dict(
    right=[
        r"initial|rows? .{0,20}1[5-9]|term|points|rank 0",
        r"factor|times|0\.33|1/3|third|divid|scale|weight|other(wise)?",
    ],
    place=[r"loss|initial|term|rank 0|rows? .{0,20}1[5-9]"],
    wrong=[
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(counted|reduced|summed|added) (twice|again|\d times)",
        r"forward .{0,30}goes wrong in",
        r"boundary\S* .{0,30}(factor|times|otherwise)",
        r"(all|every|each) (parameter|gradient)s? (is|are|has|have) .{0,20}(factor|times)",
        r"initial\S* (is|are) (lost|missing|never)",
    ],
)
WHY = (
    "The initial term exists on rank 0 alone, and DDP's mean over three ranks divides it by 3; the equation's term is multiplied by 3 against "
    "that, the boundary term is on all ranks and needs nothing. So the initial term (rows 15 to 19) enters with 1/3 of its weight in "
    "all gradients on all ranks; the two other terms, forward and reduction are right."
)
