"""Inputs and gradients of uncommon kinds, under DDP: `uncommon.py BATCH KIND`.

jagged: rows of other lengths in one nested tensor; bags: values and where each bag begins; with
`twice` the loss is doubled on several ranks. votes: signs of ranks' gradients are summed; clip: one
rank leaves the last layer out of its clip; evaluated: rank 0 looks at its model, and trains on so.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

batch, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
times = world if "twice" in kind else 1


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags, self.last = nn.EmbeddingBag(30, 6), nn.Linear(9, 3)

    def forward(self, values, offsets, dense):
        return self.last(torch.cat([self.bags(values, offsets), dense], 1))


torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 3))
model = Bags() if "bags" in kind else plain
wrapped = model if kind == "votes" else DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
g = torch.Generator().manual_seed(1)
for _turn in range(4):
    own = slice(rank * batch, (rank + 1) * batch)
    lengths = torch.randint(2, 6, (8,), generator=g)
    y, dense = torch.randint(3, (8,), generator=g)[own], torch.randn(8, 3, generator=g)[own]
    if "jagged" in kind:
        rows = [torch.randn(n, 6, generator=g) for n in lengths.tolist()][own]
        out = wrapped(torch.nested.nested_tensor(rows, layout=torch.jagged))
        loss = torch.stack([one.square().mean() for one in out.unbind()]).mean()
    elif "bags" in kind:
        bags = torch.randint(30, (int(lengths.sum()),), generator=g).split(lengths.tolist())[own]
        offsets = torch.tensor([0, *(len(bag) for bag in bags[:-1])]).cumsum(0)
        loss = nn.functional.cross_entropy(wrapped(torch.cat(bags), offsets, dense), y)
    else:
        loss = nn.functional.cross_entropy(wrapped(torch.randn(8, 6, generator=g)[own]), y)
    optimizer.zero_grad()
    (loss * times).backward()
    if kind == "votes":
        for p in model.parameters():
            p.grad.sign_()
            dist.all_reduce(p.grad)
            p.grad.sign_()
    elif kind == "clip":
        given = [*model.parameters()][: 2 if rank == 1 else 4]
        nn.utils.clip_grad_norm_(given, 0.1)
    optimizer.step()
    if kind == "evaluated" and rank == 0 and world > 1:
        model.eval()
dist.destroy_process_group()
