"""What comes before the first step, and how a run ends: `begins.py ROWS KIND`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rows, kind = int(sys.argv[1]), sys.argv[2]
world = int(os.environ.get("WORLD_SIZE", "1"))
if kind == "mesh":
    mesh = init_device_mesh("cpu", (world,))  # which makes the group
else:
    dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
x, y = torch.randn(12, 8), torch.randn(12, 4)
mine = slice(rank * rows, (rank + 1) * rows)
net = model
if kind == "mesh":
    fully_shard(model, mesh=mesh)
else:
    net = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
if kind == "state":
    get_state_dict(model, optimizer)  # steps once, with zeros
if kind == "warm":
    optimizer.step()
forward = net
if kind == "never":
    forward = lambda x: torch.tanh(x @ model[0].weight.T) @ model[2].weight.T  # noqa: E731
for step in range(4):
    if kind == "leaves" and rank == 1 and step == 1:
        break
    if kind == "barrier" and rank == 0 and step == 1:
        dist.barrier()
    optimizer.zero_grad()
    (forward(x[mine]) - y[mine]).square().mean().backward()
    optimizer.step()
