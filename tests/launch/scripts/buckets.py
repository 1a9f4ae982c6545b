"""A model in two dtypes, and a bucket of gradients for each: `buckets.py ROWS KIND`."""

import sys

import torch
import torch.distributed as dist
from torch import nn

rows, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16).bfloat16(), nn.Linear(16, 4).bfloat16()
        self.norm = nn.LayerNorm(16)

    def forward(self, x):
        h = self.norm(self.a(x.to(self.a.weight.dtype)).float())
        return self.b(h.to(self.b.weight.dtype)).float()


torch.manual_seed(0)
model = Net()
params = list(model.parameters())
x, y = torch.randn(12, 8), torch.randn(12, 4)
optimizer = torch.optim.SGD(params, 0.1)
mine = slice(rank * rows, (rank + 1) * rows)
for _step in range(3):
    optimizer.zero_grad()
    (model(x[mine]) - y[mine]).square().mean().backward()
    buckets = {}
    for param in params:
        buckets.setdefault(param.grad.dtype, []).append(param)
    for held in buckets.values():
        flat = torch.cat([param.grad.flatten() for param in held])
        dist.all_reduce(flat)
        parts = (flat / world).split([param.numel() for param in held])
        for param, part in zip(held, parts, strict=True):
            param.grad.copy_(part.view_as(param))
        if kind == "first":
            break
    optimizer.step()
