"""fully_shard on every block, and a clip by the global norm."""

import argparse

import torch
import torch.distributed as dist
from net import Net, batch_of, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
model, mesh = Net(), init_device_mesh("cpu", (world,))
for part in (*model.layers, model):
    fully_shard(part, mesh=mesh)
    part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    part.set_gradient_divide_factor(1.0 if args.bug == "not divided" else float(world))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    ids, targets = (part.tensor_split(world)[rank] for part in batch_of(args.seed, step))
    loss_of(model(ids), targets).backward()
    if args.bug == "clip by the norm of a shard":
        local = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([g.square().sum() for g in local]).sum().sqrt()
        for grad in local:
            grad.mul_(min(1.0, 0.1 / float(norm)))
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
