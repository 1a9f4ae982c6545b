"""DTensor tensor parallelism, the norms on sequence shards."""

import argparse

import torch
import torch.distributed as dist
from net import Net, batch_of, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
model, mesh = Net(), init_device_mesh("cpu", (world,))
for layer in model.layers:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(layer, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
for step in range(4):
    ids, targets = batch_of(args.seed, step, rows=5)
    loss_of(model(ids), targets).backward()
    if args.bug == "norm reduced again":  # as for sequence parallelism, which this is not
        for name, param in model.named_parameters():
            if "norm" in name:
                dist.all_reduce(param.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
