"""A MeanFlow generator (average velocity u(z, t, h) with h = t - r) under DDP over three uneven
data ranks.

The training target is the stop-gradient v - h * du/dt, where du/dt is the total derivative along
the path, taken with torch.func.jvp on the bare module while the prediction itself goes through
DDP. In the step the tangent of the third input is 0: the engineer moved from a network that
takes (z, t, r), where r stands still, to one that takes (z, t, t - r), and kept the tangents.
After re-implementations of MeanFlow whose network embeds the interval.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

TOPOLOGY = {"pools": {"train": {"axes": {"dp": 3}}}}


class VelocityNet(nn.Module):
    def __init__(self, dim=5, width=11):
        super().__init__()
        self.inp = nn.Linear(dim, width)
        self.time = nn.Linear(2, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, dim)

    def forward(self, z, t, h):
        c = torch.tanh(self.time(torch.stack([t, h], dim=-1)))
        a = torch.nn.functional.silu(self.inp(z) + c)
        a = a + torch.nn.functional.silu(self.mid(a) * (1 + c))
        return self.out(a)


def path(rows):
    t, r = rows["t"], rows["r"]
    z = (1 - t)[:, None] * rows["x"] + t[:, None] * rows["noise"]
    return z, t, t - r, rows["noise"] - rows["x"]


class Clean:
    def __init__(self, seed=0):
        self.seed = seed

    def build(self):
        torch.manual_seed(100 + self.seed)
        return VelocityNet()

    def batch(self):
        g = torch.Generator().manual_seed(200 + self.seed)
        t = 0.3 + 0.7 * torch.rand(10, generator=g)
        return {
            "x": torch.randn(10, 5, generator=g),
            "noise": torch.randn(10, 5, generator=g),
            "t": t,
            "r": t * torch.rand(10, generator=g),
        }

    def loss_sum(self, model, rows):
        z, t, h, v = path(rows)
        with torch.no_grad():
            one = torch.ones_like(t)
            _, dudt = torch.func.jvp(model, (z, t, h), (v, one, one))
        target = (v - h[:, None] * dudt).detach()
        return ((model(z, t, h) - target) ** 2).sum(), len(t)

    def distribute(self, model, ctx):
        return DDP(model, process_group=ctx.group("dp"))

    def tangents(self, z, t, h, v):
        return v, torch.ones_like(t), torch.ones_like(h)

    def target(self, net, z, t, h, v):
        with torch.no_grad():
            _, dudt = torch.func.jvp(net, (z, t, h), self.tangents(z, t, h, v))
        return v - h[:, None] * dudt

    def step(self, model, batch, ctx):
        group = ctx.group("dp")
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        total = len(batch["t"])
        mine = {k: v.tensor_split(world)[rank] for k, v in batch.items()}
        z, t, h, v = path(mine)
        target = self.target(model.module, z, t, h, v)
        loss = ((model(z, t, h) - target) ** 2).sum() * world / total
        loss.backward()


class Buggy(Clean):
    def tangents(self, z, t, h, v):
        # along the path z moves with v and t with 1
        return v, torch.ones_like(t), torch.zeros_like(h)


EXPECT = {
    "right": [
        (
            r"tangent|jvp|du\s*/?\s*dt|dudt|total derivative|partial derivative|"
            r"time derivative|directional derivative"
        ),
        r"\bh\b|interval|t\s*-\s*r|third (input|argument)|zeros?_like|duration",
    ],
    "place": [r"tangents", r"jvp", r"\btarget\b", r"zeros_like\(h\)", r"dudt"],
    "wrong": [
        r"divided by (the )?(world|number of ranks)|world size",
        r"target (is )?not detached|keeps? (its|the) graph|missing (detach|stop.?grad)",
        r"bypass(es|ing)? DDP|no_sync|not (all-?)?reduced",
        r"mean of (the )?(uneven|local|rank) means",
    ],
}

WHY = (
    "The regression target needs the total derivative of u(z, t, h) along the path, and since "
    "h = t - r with r fixed, h moves by 1 when t does. The step gives h the tangent 0, so "
    "du/dt lacks the term du/dh and the target v - h*du/dt is wrong. Every parameter's "
    "gradient is wrong, on all ranks alike, and the reduction over ranks is right. A right "
    "cause says that the tangent of the interval h (t - r) in the jvp is zero and has to be "
    "one. Fix: tangents (v, 1, 1)."
)
