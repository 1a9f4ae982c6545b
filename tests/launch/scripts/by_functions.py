"""A model that is only ever called through torch.func: `by_functions.py BATCH KIND`.

Gradients of each row by vmap, clipped, summed and given a noise that all have (right),
or clipped by the rank's mean (mean); or one inner step on rows that all have, and the gradient
through it (inner), of which rank 1 leaves the second derivative out (first).
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, grad, vmap

batch, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.5)
noise = torch.Generator().manual_seed(1)


def loss_of(params, x, y):
    return nn.functional.cross_entropy(functional_call(model, params, (x,)), y)


def of_a_row(params, x, y):
    return loss_of(params, x[None], y[None])


def by_rows(x, y):
    params = {name: p.detach() for name, p in model.named_parameters()}
    of_rows = vmap(grad(of_a_row), (None, 0, 0))(params, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in of_rows.values()]).norm(dim=0)
    shares = (0.3 / norms).clamp(max=1.0)
    if kind == "mean":
        shares = shares.mean().expand_as(shares)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("i,i...->...", shares, of_rows[name])
        dist.all_reduce(p.grad)
        p.grad = (p.grad + 0.01 * torch.randn(p.shape, generator=noise)) / 12


def through_a_step(x, y):
    own = dict(model.named_parameters())
    kept = not (kind == "first" and rank == 1)
    again = {name: p + 0.0 for name, p in own.items()}
    slopes = torch.autograd.grad(loss_of(again, *shown), [*again.values()], create_graph=kept)
    stepped = {n: p - 0.1 * g for (n, p), g in zip(own.items(), slopes, strict=True)}
    (loss_of(stepped, x, y) * batch / 12).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)


data = torch.Generator().manual_seed(2)
shown = torch.randn(5, 6, generator=data), torch.randint(3, (5,), generator=data)
for _turn in range(4):
    x, y = torch.randn(12, 6, generator=data), torch.randint(3, (12,), generator=data)
    mine = slice(rank * batch, (rank + 1) * batch)
    (by_rows if kind in ("right", "mean") else through_a_step)(x[mine], y[mine])
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
