"""Optimizers whose step calls that of their base, beside a plain one: `based.py KIND`.

Each parameter is stepped by its owner alone, which then sends it to all. KIND: right; unsent:
nothing is sent; raises: the first inner step raises, is caught, and is done again.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

kind = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Owned(torch.optim.SGD):
    """SGD that keeps its state where a parameter is owned."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        gradients = [p.grad for p in params]
        for at, p in enumerate(params):
            if at % world != rank:
                p.grad = None
        try:
            super().step()
        except RuntimeError:
            super().step()
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient
        if kind != "unsent":
            for at, p in enumerate(params):
                dist.broadcast(p, at % world)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
plain = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)
owned = Owned(model[0].parameters(), 0.1)


calls = []


def once(optimizer, args, kwargs):
    calls.append(optimizer)
    if kind == "raises" and len(calls) == 2:  # the first is of the outer step
        raise RuntimeError("once")


owned.register_step_pre_hook(once)
for turn in range(4):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(turn)).tensor_split(world)[rank]
    (model(x).square().sum() / 18).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    plain.step()
    owned.step()
    plain.zero_grad()
    owned.zero_grad()
dist.destroy_process_group()
