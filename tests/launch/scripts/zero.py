"""Optimizer states divided over ranks by hand: `zero.py ROWS KIND`."""

import sys

import torch
import torch.distributed as dist
from torch import nn

rows, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
params = list(model.parameters())
x, y = torch.randn(12, 5), torch.randn(12, 3)
whole = len(params) // world * world if kind == "rest" and world > 1 else len(params)
optimizer = torch.optim.AdamW(params[:whole][rank::world], 1e-2)
mine = slice(rank * rows, (rank + 1) * rows)
for _step in range(3):
    model.zero_grad()
    (model(x[mine]) - y[mine]).square().mean().backward()
    for param in params:
        dist.all_reduce(param.grad)
        param.grad /= world
    optimizer.step()
    for i, param in enumerate(params):
        if kind != "kept":
            dist.broadcast(param.data, src=i % world)
