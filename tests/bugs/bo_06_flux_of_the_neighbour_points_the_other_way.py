"""A domain-decomposed physics-informed network (XPINN) for -u'' + c u = m sin(pi x) on [0, 1] with three subdomains, a network each, one rank each. A row is a value of m with five collocation points in each
subdomain; the loss has the squared residuals, the boundary values, and at both interfaces the squared jump of u and of its flux. Each rank computes its own subdomain's terms, exchanges u and the outward flux at
its interfaces with the neighbours (detached: each side trains against the other's value, which is the gradient of the shared term), in two micro-batches; at the end the gradients are summed.

The bug: what is exchanged is the flux along the outward normal, so that of two matching sides the fluxes cancel; the jump is computed as a difference. After reports on flux continuity in cPINN/XPINN and
discontinuous Galerkin codes (the sign of the neighbour's normal).
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"domain": 3}}}}
DOMAINS, POINTS, WIDTH, ROWS = 3, 5, 6, 7
REACTION = 2.0


class Piece(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(2, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x, m):
        h = torch.tanh(self.enter(torch.stack([3 * x, m], -1)))
        return self.leave(torch.tanh(self.hidden(h)))[..., 0]


class Pieces(nn.Module):
    def __init__(self):
        super().__init__()
        self.pieces = nn.ModuleList([Piece() for _ in range(DOMAINS)])


def with_slope(piece, x, m):
    x = x.detach().requires_grad_()
    u = piece(x, m)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return x, u, slope


def residuals(piece, x, m):
    m = m[:, None].expand_as(x)
    x, u, slope = with_slope(piece, x, m)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (-second + REACTION * u - m * torch.sin(torch.pi * x)).square().sum() / POINTS


def at(piece, place, m):
    _, u, slope = with_slope(piece, torch.full_like(m, place), m)
    return u, slope


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Pieces()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        x = (
            torch.rand(ROWS, DOMAINS, POINTS, generator=g) + torch.arange(DOMAINS)[:, None]
        ) / DOMAINS
        return {"x": x, "m": 1 + torch.rand(ROWS, generator=g)}

    def loss_sum(self, model, rows):
        m, total = rows["m"], 0.0
        with torch.enable_grad():
            for n, piece in enumerate(model.pieces):
                total = total + residuals(piece, rows["x"][:, n], m)
            total = (
                total
                + at(model.pieces[0], 0.0, m)[0].square().sum()
                + at(model.pieces[-1], 1.0, m)[0].square().sum()
            )
            for n in range(DOMAINS - 1):
                (u, slope), (v, other) = (
                    at(model.pieces[n], (n + 1) / DOMAINS, m),
                    at(model.pieces[n + 1], (n + 1) / DOMAINS, m),
                )
                total = total + (u - v).square().sum() + (slope - other).square().sum()
        return total, len(m)

    def exchange(self, values, neighbour, ctx):
        """u and outward flux of this side go over, those of the other side come back."""
        theirs = torch.empty_like(values)
        work = dist.isend(values.detach().contiguous(), neighbour, group=ctx.group("domain"))
        dist.recv(theirs, neighbour, group=ctx.group("domain"))
        work.wait()
        return theirs

    def flux_jump(self, flux, theirs):
        return flux + theirs

    def interface(self, piece, place, outward, neighbour, m, ctx):
        u, slope = at(piece, place, m)
        flux = outward * slope
        their_u, their_flux = self.exchange(torch.stack([u, flux]), neighbour, ctx)
        return (u - their_u).square().sum() + self.flux_jump(flux, their_flux).square().sum()

    def domain_loss(self, model, part, ctx):
        n, m = ctx.rank, part["m"]
        piece = model.pieces[n]
        total = residuals(piece, part["x"][:, n], m)
        if n == 0:
            total = total + at(piece, 0.0, m)[0].square().sum()
        else:
            total = total + self.interface(piece, n / DOMAINS, -1.0, n - 1, m, ctx)
        if n == DOMAINS - 1:
            total = total + at(piece, 1.0, m)[0].square().sum()
        else:
            total = total + self.interface(piece, (n + 1) / DOMAINS, 1.0, n + 1, m, ctx)
        return total

    def step(self, model, batch, ctx):
        for p in model.parameters():
            p.grad = None
        for n in range(2):
            part = {k: x.tensor_split(2)[n] for k, x in batch.items()}
            (self.domain_loss(model, part, ctx) / ROWS).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad, group=ctx.group("domain"))


class Buggy(Clean):
    def flux_jump(self, flux, theirs):
        return flux - theirs


EXPECT = dict(
    right=[
        r"flux|jump|interface|theirs|neighbour|exchange|received",
        r"sign|minus|differ|subtract|opposite|outward|normal|sum|added|forward|flux_jump|combin|wrong",
    ],
    place=[r"flux_jump", r"interface", r"their_flux|theirs", r"domain_loss"],
    wrong=[
        r"parameters?.{0,30}(not (been )?(all.?)?reduced|reduced (twice|again))|missing (all.?)?reduc|wrong group",
        r"divisor|mean of means|micro.?batch(es)? .{0,20}(lost|dropped|overwritten)|only the last micro.?batch",
        r"detach|no gradient.{0,30}(neighbour|exchange|sent)|counted twice|both sides count",
        r"residuals.{0,20}(is|are) wrong|backward formula|(wrong|other) rows|from the wrong (rank|neighbour)",
    ],
)
WHY = (
    "interface() exchanges the flux along each side's outward normal, which has opposite signs on the two sides of an interface, so the jump of the derivative is flux + theirs; Buggy.flux_jump takes flux - theirs, "
    "that is the sum of the two slopes. It is wrong on all three ranks (both interfaces of rank 1), in all rows and micro-batches; the values u, slopes, what is exchanged, the residuals, boundary terms and the jump of "
    "u are right, so the gradients of all pieces lack the right flux term. The sum of the gradients is right, as is the detached exchange: each side's part of the derivative is computed on its own rank. Fix: flux + theirs."
)
