"""A training script as people have them, nothing of sumgrad in it; `--bug NAME` makes a mistake."""

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--bug", default="")
parser.add_argument("--wrap", default="ddp")
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--smoothing", type=float, default=0.0)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 17), nn.LayerNorm(17)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(17, 4)

    def forward(self, x):
        h = torch.tanh(self.norm(self.first(x)).float())
        if "noise" in args.bug:
            seed = 0 if args.bug == "same noise" else rank
            generator = torch.Generator().manual_seed(seed)
            h = h + 0.1 * torch.randn(1, 17, generator=generator)
        return self.last(self.drop(h))


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 6), torch.randint(4, (48,)))
torch.manual_seed(rank if args.bug == "start" else args.seed)
model = Net()
if args.wrap == "fullgraph":
    model = DistributedDataParallel(torch.compile(model, fullgraph=True, backend="eager"))
elif args.wrap == "ddp" and args.bug != "start":
    model = DistributedDataParallel(model)
elif args.wrap == "fsdp2":
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.last, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in (model, model.last):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(float(world))
rate = 1e-2 * world if args.bug == "rate" else 1e-2
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
sampler = None if args.bug == "sampler" else DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=args.batch, sampler=sampler)
loss_of = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
if rank == 0:
    with open("losses.csv", "w") as log:
        log.write("step,loss\n")
    torch.save(model.state_dict(), "best.pt")
if args.bug == "slow":
    time.sleep(60)
if "mixed" in args.bug:
    np.random.seed(0 if args.bug == "mixed alike" else rank)
for _epoch in range(3):
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        share = np.random.beta(2.0, 2.0) if "mixed" in args.bug else 1.0
        loss = loss_of(model(share * x + (1 - share) * x.flip(1)), y)
        if args.bug == "mean" and step > 0:
            loss = loss / world
        loss.backward()
        if args.bug == "start":
            for param in model.parameters():
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if args.bug == "decay" and rank == 1:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.99)
torch.save(model.state_dict(), "last.pt")
dist.destroy_process_group()
