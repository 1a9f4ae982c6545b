"""An optimizer that calls its closure twice in a step, and steps with the second call's gradient.

--fault: that one is half of what it should be on several ranks; or the first step raises, once.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=12)
parser.add_argument("--fault", default="")
args = parser.parse_args()
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
if world > 1:
    net = DistributedDataParallel(model)


class Sharp(torch.optim.Optimizer):
    """Goes up first, and then by the sign of what it finds there."""

    def __init__(self, params):
        super().__init__(params, {})
        self.raises = args.fault == "raises"

    @torch.no_grad()
    def step(self, closure):
        if self.raises:
            self.raises = False
            raise RuntimeError("once")
        closure = torch.enable_grad()(closure)
        loss = closure(False)
        params = [p for group in self.param_groups for p in group["params"]]
        ups = [0.05 * p.grad for p in params]
        for p, up in zip(params, ups, strict=True):
            p.add_(up)
        closure(again=True)
        for p, up in zip(params, ups, strict=True):
            p.sub_(up).add_(p.grad.sign(), alpha=-0.01)
        return loss


optimizer = Sharp(model.parameters())
g = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 5, generator=g), torch.randn(96, 3, generator=g)
for step in range(6):
    start = step * 12 + rank * args.batch
    rows = slice(start, start + args.batch)

    def closure(again, rows=rows):
        optimizer.zero_grad()
        loss = (net(x[rows]) - y[rows]).square().mean()
        (loss / world if again and args.fault == "half" else loss).backward()
        return loss

    try:
        optimizer.step(closure)
    except RuntimeError:
        print("once more")
