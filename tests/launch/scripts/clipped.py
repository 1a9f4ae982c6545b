"""A mean of means whose factor a clip hides: DDP averages what was divided by all ranks' rows."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

batch, limit = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    torch.manual_seed(10 + step)
    x, y = torch.randn(batch * world, 5), torch.randn(batch * world, 3)
    mine = slice(rank * batch, (rank + 1) * batch)
    loss = (model(x[mine]) - y[mine]).square().sum() / (batch * world * 3)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), limit)
    scaler.step(optimizer)
    scaler.update()
