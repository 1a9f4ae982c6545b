"""Bugs in data parallelism: wrong counts, wrong averages, gradients that miss their reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from sumgrad.workloads.planted.register import planted
from sumgrad.workloads.programs.data_parallel import MICRO_BATCHES, DataParallel
from sumgrad.workloads.programs.ddp import DDP
from sumgrad.workloads.programs.fsdp2 import FullyShard
from torch.nn.parallel import DistributedDataParallel


@planted(
    "data_parallel",
    "local_mean",
    "M01",
    "each rank divides by its own tokens and the means are averaged",
    "mean_of_means",
)
class LocalMean(DataParallel):
    def global_count(self, mine):
        return mine["valid"].sum() * dist.get_world_size()


@planted(
    "data_parallel",
    "micro_batch_mean",
    "M01",
    "each micro-batch is divided by its own tokens",
    "mean_of_means",
)
class MicroBatchMean(DataParallel):
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, count = self.loss_sum(model, micro)
            (loss / count / MICRO_BATCHES / ctx.world_size).backward()
        self.reduce(model)


@planted(
    "data_parallel",
    "count_positions",
    "M02",
    "the loss is divided by all positions, padding included",
    "factor",
    "wrong_count",
)
class CountPositions(DataParallel):
    def global_count(self, mine):
        count = torch.tensor(mine["valid"].numel())
        dist.all_reduce(count)
        return count


@planted(
    "data_parallel",
    "double_divide",
    "M03",
    "divided by the number of micro-batches in the loss and in the accumulator",
    "factor",
)
class DoubleDivide(DataParallel):
    def global_count(self, mine):
        return super().global_count(mine) * MICRO_BATCHES


@planted(
    "data_parallel",
    "drop_divide",
    "M04",
    "a sum-reduced loss that nobody divides by the tokens",
    "factor",
)
class DropDivide(DataParallel):
    def global_count(self, mine):
        return torch.tensor(1)


@planted(
    "data_parallel",
    "avg_silently_sum",
    "M24",
    "scaled for an AVG that the backend carries out as a SUM",
    "factor",
)
class AvgSilentlySum(DataParallel):
    def global_count(self, mine):
        return super().global_count(mine) / dist.get_world_size()


@planted(
    "data_parallel",
    "drop_return_value",
    "M25",
    "an out-of-place collective is called and its result is not used",
    "unused_result",
    "skipped_collective",
)
class DropReturnValue(DataParallel):
    def reduce(self, model):
        for param in model.parameters():
            funcol.wait_tensor(funcol.all_reduce(param.grad, "sum", dist.group.WORLD))


@planted(
    "data_parallel",
    "add_after_reduce",
    "M35",
    "the last micro-batch is added after the all-reduce",
    "late_gradient",
)
class AddAfterReduce(DataParallel):
    reduce_after = MICRO_BATCHES - 2

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = self.global_count(mine)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            loss, _ = self.loss_sum(model, micro)
            (loss / count).backward()
            if i == self.reduce_after:
                self.reduce(model)


@planted(
    "data_parallel",
    "reduce_on_rank_with_work",
    "M43",
    "a rank that saw no long sequence leaves a parameter out of the reduction",
    "wrong_group",
    "row_factors",
    "open",
    "too_few_ranks",
)
class ReduceWhereUsed(DataParallel):
    def reduce(self, model):
        some = dist.new_group([0, 1])
        for name, param in model.named_parameters():
            if not name.startswith("up"):
                dist.all_reduce(param.grad)
            elif dist.get_rank() < 2:
                dist.all_reduce(param.grad, group=some)


@planted(
    "data_parallel",
    "first_weight_broadcast",
    "M61",
    "every token's gradient is multiplied by the first token's weight",
    "open",
    "backward",
)
class FirstWeight(DataParallel):
    def step(self, model, batch, ctx):
        weight = batch["valid"][:, :1] | ~batch["valid"]
        super().step(model, {**batch, "valid": weight.expand_as(batch["valid"])}, ctx)


@planted(
    "ddp",
    "ddp_average",
    "M07",
    "DDP's own average under a loss that is already divided by the global count",
    "avg",
)
class DDPAverage(DDP):
    def distribute(self, model, ctx):
        return DistributedDataParallel(model)


@planted(
    "ddp",
    "sync_first_only",
    "M38",
    "the reduction is dispatched with the first micro-batch; later ones stay local",
    "late_gradient",
)
class SyncFirst(DDP):
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = self.global_count(mine)
        for i in range(MICRO_BATCHES):
            micro = {k: v.tensor_split(MICRO_BATCHES)[i] for k, v in mine.items()}
            if i == 0:
                loss, _ = self.loss_sum(model, micro)
                (loss / count).backward()
            else:
                with model.no_sync():
                    loss, _ = self.loss_sum(model, micro)
                    (loss / count).backward()


@planted(
    "fsdp2",
    "fsdp_average",
    "M07",
    "fully_shard's average is left on under a loss with the global count",
    "avg",
    "factor",
)
class FsdpAverage(FullyShard):
    def distribute(self, model, ctx):
        model = super().distribute(model, ctx)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(ctx.world_size))
        return model


# ---- tensor parallelism --------------------------------------------------------------------------
