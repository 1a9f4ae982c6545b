"""A physics-informed net for Burgers' equation with an unknown viscosity; collocation points and measured points cut over three ranks (5, 4
and 4), gradients reduced in one flat buffer. After the much-asked question about PINNs: which of the nested
torch.autograd.grad calls need create_graph=True.
"""

import torch
import torch.distributed as dist
from torch import nn

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}
POINTS, WIDTH = 13, 12


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.middle = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, 1, bias=False)
        self.log_nu = nn.Parameter(torch.tensor(-0.7))
        with torch.no_grad():
            self.enter.weight.mul_(2)
            self.leave.weight.mul_(2)

    def forward(self, at):
        h = torch.tanh(self.enter(at))
        return self.leave(torch.tanh(self.middle(h)) + h).squeeze(-1)


def slope(y, at):
    return torch.autograd.grad(y.sum(), at, create_graph=True)[0]


def curvature(y_x, at):
    return torch.autograd.grad(y_x.sum(), at, create_graph=True)[0][:, 0]


def field_loss(model, rows, curved):
    at = rows["at"].detach().clone().requires_grad_()
    u = model(at)
    u_x, u_t = slope(u, at).unbind(1)
    residual = u_t + u * u_x - model.log_nu.exp() * curved(u_x, at)
    return torch.where(rows["measured"], 4 * (u - rows["u"]).square(), residual.square()).sum()


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(self.seed)
        return Field()

    def batch(self):
        g = torch.Generator().manual_seed(self.seed + 1)
        at = torch.rand(POINTS, 2, generator=g) * 2 - 1
        return {
            "at": at,
            "u": -torch.sin(3.14 * at[:, 0]),
            "measured": torch.arange(POINTS) % 4 == 2,
        }

    def loss_sum(self, model, rows):
        return field_loss(model, rows, curvature), len(rows["at"])

    curved = staticmethod(curvature)

    def step(self, model, batch, ctx):
        n, me, group = ctx.axes["dp"], ctx.coords["dp"], ctx.group("dp")
        rows = {k: v.tensor_split(n)[me] for k, v in batch.items()}
        (field_loss(model, rows, self.curved) / POINTS).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat, group=group)
        for p, part in zip(
            model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True
        ):
            p.grad.copy_(part.view_as(p))


class Buggy(Clean):
    @staticmethod
    def curved(y_x, at):
        return torch.autograd.grad(y_x.sum(), at, retain_graph=True)[0][:, 0]


EXPECT = dict(
    right=[
        r"loss|backward|gradient|graph|detach|path|curved|second",
        r"loss|detach|path|graph|never comes|curved|part of|before anything is reduced|enter|middle|leave",
    ],
    place=[r"enter|middle|leave|loss|curved", r"(all|every|each) rank|ranks? 0|rank"],
    wrong=[
        r"forward is (wrong|right up to)|forward goes wrong",
        r"log_nu\S* (is|are) (also )?wrong",
        r"(never|not) (been )?(all.?)?reduced|missing (all.?)?reduc",
        r"(own|local) (count|denominator|divisor)",
        r"rows? (are |is )?(read twice|never read)",
    ],
)
WHY = (
    "The second derivative u_xx is taken with retain_graph in place of create_graph, so it is a constant to the loss: its value and that of the "
    "loss are right, log_nu's gradient too, but what the viscous term gives to the net's weights is missing on every rank, at the collocation "
    "points only. The measured points' part, the count, and the reduction are right."
)
