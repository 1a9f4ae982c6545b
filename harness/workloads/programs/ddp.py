"""PyTorch's DistributedDataParallel, summing: its own average is switched off by a comm hook.

    sumgrad run topologies/ddp.yaml

DDP divides by the world size before its all-reduce. A communication hook gets the buckets before
that; this one only sums. All but the last micro-batch run under no_sync.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from sumgrad.workloads.programs.data_parallel import MICRO_BATCHES, DataParallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def sum_hook(_, bucket):
    """The hook that torch documents for this; its buckets are not divided."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


class DDP(DataParallel):
    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        wrapped.register_comm_hook(None, sum_hook)
        return wrapped

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = self.global_count(mine)
        for i in range(MICRO_BATCHES):
            last = i == MICRO_BATCHES - 1
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            with contextlib.nullcontext() if last else model.no_sync():
                loss, _ = self.loss_sum(model, micro)
                (loss / count).backward()
