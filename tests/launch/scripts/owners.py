"""Two models, each with an optimizer; the second steps at every third turn, and is not reduced."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
first, second = nn.Linear(5, 3), nn.Linear(3, 2)
reduced = DistributedDataParallel(first)
last = second if sys.argv[1] == "bug" else DistributedDataParallel(second)
one = torch.optim.SGD(first.parameters(), 0.1)
other = torch.optim.SGD(second.parameters(), 0.1)
for turn in range(12):
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(turn)).tensor_split(world)[rank]
    if turn % 3 < 2:
        with torch.no_grad():
            last(torch.zeros(1, 3))
        reduced(x).square().mean().backward()
        one.step()
    else:
        with torch.no_grad():
            y = reduced(x)
        last(y).square().mean().backward()
        other.step()
    one.zero_grad()
    other.zero_grad()
dist.destroy_process_group()
