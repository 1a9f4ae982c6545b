"""Right and wrong steps that once had another verdict: `odd.py ROWS KIND`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

rows, kind = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mine = slice(rank * rows, (rank + 1) * rows)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 6, 2, dropout=0.3 if kind == "lstm" else 0.0, batch_first=True)
        self.head, self.probe = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.rnn(x)[0][:, -1]
        return self.head(h), self.probe(h.detach())


if kind == "launched" and not dist.is_torchelastic_launched():
    raise SystemExit("not started by torchrun")
net = Net()
by_hand = list(net.probe.parameters())
optimizer = torch.optim.SGD([p for n, p in net.named_parameters() if "probe" not in n], 0.1)
file = Path(__file__).parent / f"mask_{os.getpid()}.pt"
mask = torch.zeros(12, 1)
mask[[0, 1, 2, 3, 7, 9]] = 1.0
torch.save(mask, file)
kept = torch.load(file)  # in float32, whatever the rest is computed in
file.unlink()
for step in range(4):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 4, 5, generator=generator), torch.randn(12, 3, generator=generator)
    out, beside = net(x[mine])
    each = (out - y[mine]).square() * kept[mine]
    count = kept[mine].sum() if kind == "mask" else kept.sum() / world
    loss = each.sum() / count.clamp(min=1) / 3 + beside.square().mean()
    if kind == "nan" and rank == 1 and step == 1:
        loss = loss * float("nan")
    loss.backward()
    for param in net.parameters():
        if kind != "probe" or all(param is not p for p in by_hand):
            dist.all_reduce(param.grad)
            param.grad /= world
    if kind == "probe":
        with torch.no_grad():
            for param in by_hand:
                param.sub_(0.1 * param.grad)
                param.grad = None
    optimizer.step()
    optimizer.zero_grad()
