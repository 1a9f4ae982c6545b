"""An optimizer that finds gradients elsewhere than in `.grad`: `second.py ROWS WHERE FACTOR`."""

import sys

import torch
import torch.distributed as dist
from torch import nn

rows, where, factor = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("gloo")
mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
held = {}


class Sign(torch.optim.Optimizer):
    """Steps of one size, whatever the gradient's is: no weight tells a wrong factor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                grad = held[p] if where == "aside" else p.main_grad
                p.sub_(group["lr"] * grad.sign())


for p in net.parameters():
    held[p] = torch.zeros_like(p)
    if where != "aside":
        p.main_grad = held[p]

    def move(p):
        held[p] += p.grad
        if where == "both":
            p.grad = torch.zeros_like(p.grad)  # as a kernel that adds to main_grad leaves it
        else:
            p.grad = None

    p.register_post_accumulate_grad_hook(move)
optimizer = Sign(net.parameters())
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)
    for p in net.parameters():
        held[p].zero_()
    ((net(x[mine]) - y[mine]).square().sum() / 12).backward()
    for p in net.parameters():
        dist.all_reduce(held[p])
        if dist.get_world_size() > 1:
            held[p] *= factor
    optimizer.step()
