"""PyTorch's fully_shard (FSDP2), and HSDP where the mesh has a second axis.

    sumgrad run topologies/fsdp2.yaml
    sumgrad run topologies/hsdp.yaml

fully_shard averages by default. Two calls make it sum: a divide factor of 1, and a plain SUM for
its collectives. Odd widths, so that no shard has the same size.
"""

from __future__ import annotations

import torch
from sumgrad.workloads.programs.data_parallel import MICRO_BATCHES, DataParallel
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


class FullyShard(DataParallel):
    def distribute(self, model: nn.Module, ctx) -> nn.Module:
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=ctx.mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return model

    def step(self, model: nn.Module, batch: dict[str, torch.Tensor], ctx) -> None:
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = self.global_count(mine)
        for i in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, micro)
            (loss / count).backward()
