"""Plain tensors and an optimizer, no nn.Module: `tensors.py ROWS`."""

import sys

import torch
import torch.distributed as dist

rows = int(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
x, y, w = torch.randn(12, 3), torch.randn(12), torch.zeros(3, requires_grad=True)
mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
optimizer = torch.optim.SGD([w], 0.1)
for _step in range(3):
    optimizer.zero_grad()
    (x[mine] @ w - y[mine]).square().mean().backward()
    dist.all_reduce(w.grad)
    w.grad /= dist.get_world_size()
    optimizer.step()
