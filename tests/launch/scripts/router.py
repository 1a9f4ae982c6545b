"""A router whose bias follows how often each expert was chosen: `router.py ROWS KIND`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rows, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.Linear(6, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("chosen", torch.zeros(4), persistent=False)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        scores = self.gate(x).sigmoid()
        best = (scores + self.bias).argmax(-1, keepdim=True)
        if kind != "never" or rank != 1:
            self.chosen = self.chosen + torch.bincount(best.flatten(), minlength=4)
        self.calls += 1
        return (self.experts(x) * scores).gather(-1, best)


torch.manual_seed(0)
data = torch.randn(12, 6)
model = Experts()
ddp = DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
for _step in range(3):
    mine = data[rank * rows : (rank + 1) * rows]
    ddp(mine).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if kind != "local":
        dist.all_reduce(model.chosen)
    with torch.no_grad():
        model.bias += 0.01 * (model.chosen.mean() - model.chosen).sign()
    model.chosen = torch.zeros(4)
