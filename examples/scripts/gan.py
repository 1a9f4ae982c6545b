"""A GAN on processes that it starts by itself: two optimizers, two models, no launcher."""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def work(rank, world, place):
    dist.init_process_group(
        "gloo", init_method=f"file://{place}_{world}", rank=rank, world_size=world
    )
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5))
    judged = nn.Sequential(nn.Linear(5, 9), nn.LeakyReLU(0.2), nn.Linear(9, 1))
    make, judge = DistributedDataParallel(made), DistributedDataParallel(judged)
    first = torch.optim.Adam(judge.parameters(), 1e-2)
    second = torch.optim.Adam(make.parameters(), 1e-2)
    score = nn.BCEWithLogitsLoss()
    for step in range(4):
        g = torch.Generator().manual_seed(step)
        real = torch.randn(12, 5, generator=g)[rank::world]
        fake = make(torch.randn(12, 4, generator=g)[rank::world])
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        first.zero_grad()
        (score(judge(real), ones) + score(judge(fake.detach()), zeros)).backward()
        first.step()
        second.zero_grad()
        loss = score(judge(fake), ones)
        (loss * world if "bug" in sys.argv else loss).backward()
        second.step()


if __name__ == "__main__":
    mp.spawn(work, (int(sys.argv[1]), sys.argv[2]), int(sys.argv[1]))
