"""FullyShardedDataParallel with flat parameters, as it is by default."""

import argparse

import torch
import torch.distributed as dist
from net import Block, Net, batch_of, loss_of
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--bug", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
model = FullyShardedDataParallel(
    Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(4):
    ids, targets = (part.tensor_split(world)[rank] for part in batch_of(args.seed, step))
    if args.bug == "rows of another step" and rank == 1 and step == 1:
        ids, targets = (part.tensor_split(world)[rank] for part in batch_of(args.seed, 0))
    loss_of(model(ids), targets).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
