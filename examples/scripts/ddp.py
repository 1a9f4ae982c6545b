"""A DistributedDataParallel loop with a sampler, accumulation, clipping and a scheduler."""

import argparse

import torch
import torch.distributed as dist
from net import VOCABULARY, Net, loss_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
ids, targets = (torch.randint(VOCABULARY, (96, 7)) for _ in range(2))
data = TensorDataset(ids, targets)
sampler = None if args.bug == "same rows" else DistributedSampler(data, seed=args.seed)
loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
torch.manual_seed(args.seed + (rank if args.bug == "unequal start" else 0))
net = Net()
model = net if args.bug == "unequal start" else DistributedDataParallel(net)
scale = world if args.bug == "learning rate by world size" and world > 1 else 1
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * scale, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
for number, (x, y) in enumerate(loader):
    last = number % args.accumulate == args.accumulate - 1
    if args.bug == "never synchronised":
        model.require_backward_grad_sync = False
    elif args.bug != "unequal start":
        model.require_backward_grad_sync = last
    loss = loss_of(model(x), y) / args.accumulate
    if args.bug == "divided by world size again":
        loss = loss / world
    loss.backward()
    if not last:
        continue
    if args.bug in ("unequal start", "reduced again"):
        op = dist.ReduceOp.AVG if args.bug == "unequal start" else dist.ReduceOp.SUM
        for param in model.parameters():
            dist.all_reduce(param.grad, op=op)
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if args.bug == "decay twice" and rank == world - 1 and world > 1:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 - 1e-3)
dist.destroy_process_group()
