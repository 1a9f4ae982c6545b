"""PyTorch's DistributedDataParallel, summing: its own average is switched off by a comm hook.

    sumgrad run topologies/ddp.yaml

DDP divides by the world size before its all-reduce. A communication hook gets the buckets before
that; the convention's only sums. All but the last micro-batch run under no_sync.
"""

from __future__ import annotations

import contextlib

import torch
from sumgrad.convention import ddp_sum_hook
from sumgrad.workloads.programs.data_parallel import MICRO_BATCHES, DataParallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class DDP(DataParallel):
    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
        wrapped.register_comm_hook(None, ddp_sum_hook)
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
