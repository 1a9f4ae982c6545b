"""A model in bfloat16 with a small head: `half.py ROWS KIND`."""

import sys

import torch
import torch.distributed as dist
from torch import nn

rows, kind = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
model.bfloat16()
with torch.no_grad():
    model[4].weight.mul_(0.1)  # the other gradients are small beside this one's
rate = 0.05 * (40 if kind == "rate" and world > 1 else 1)
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
generator = torch.Generator().manual_seed(1)
for _step in range(5):
    x = torch.randn(rows * world, 16, generator=generator).bfloat16()
    y = 4 * torch.randn(rows * world, 4, generator=generator).bfloat16()
    mine = slice(rank * rows, (rank + 1) * rows)
    optimizer.zero_grad()
    (model(x[mine]) - y[mine]).square().mean().backward()
    for name, param in model.named_parameters():
        dist.all_reduce(param.grad)
        param.grad /= world
        if kind == "sign" and world > 1 and name == "0.weight":
            param.grad.neg_()
    optimizer.step()
