"""Scripts that do not come to an end as they should: `bad.py KIND`."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

kind = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _step in range(5):
    model(torch.ones(2, 3)).sum().backward()
    if kind == "no step" or (kind == "one rank" and dist.get_rank() == 1):
        continue
    optimizer.step()
    if kind == "raise":
        raise ValueError("out of data")
    if kind == "stop" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "hang" and dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()
