"""Gradients that are reduced while something else goes on: `overlapped.py ROWS KIND`."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

rows, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
params = list(model.parameters())
x, y = torch.randn(12, 8), torch.randn(12, 4)
mine = slice(rank * rows, (rank + 1) * rows)
works = []


def reduce(param):
    works.append(dist.all_reduce(param.grad, async_op=True))


if kind == "weights":  # of each an owner steps, and gives it to the others under way

    class Owners(torch.optim.SGD):
        def step(self, closure=None):
            for i, param in enumerate(params):
                param.grad = param.grad if i % world == rank else None
            super().step(closure)
            for i, param in enumerate(params):
                works.append(dist.broadcast(param.data, i % world, async_op=True))

    optimizer = Owners(params, 0.1)

    def arrive(*_):
        for work in works:
            work.wait()
        works.clear()

    model.register_forward_pre_hook(arrive)
elif kind != "ddp":
    for param in params:
        param.register_post_accumulate_grad_hook(reduce)
else:
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
if kind != "weights":
    optimizer = torch.optim.SGD(params, 0.1)
for _step in range(4):
    optimizer.zero_grad()
    (model(x[mine]) - y[mine]).square().mean().backward()
    if kind == "weights":
        for param in params:
            dist.all_reduce(param.grad)
            param.grad /= world
        optimizer.step()
        continue
    time.sleep(0.05)  # it is done by now, as a rule
    if kind == "written":
        for param in params:
            param.grad /= world
    if kind == "read":
        scaled = [param.grad / world for param in params]
    for work in works:
        work.wait()
    works.clear()
    if kind == "waited":
        for param in params:
            param.grad /= world
    if kind == "read":
        for param, grad in zip(params, scaled, strict=True):
            param.grad = grad
    optimizer.step()
for work in works:
    work.wait()
