"""Shipped Programs with a real bug written into their code: the faults of the third layer.

Each is a subclass that changes one method as the bug did. PLANTED says what it is called, which
operator of the catalogue it plants, the report it resembles, and what the Diagnosis must call it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from sumgrad.workloads.programs import megatron
from sumgrad.workloads.programs.context_parallel import ContextParallel
from sumgrad.workloads.programs.data_parallel import MICRO_BATCHES, DataParallel
from sumgrad.workloads.programs.ddp import DDP
from sumgrad.workloads.programs.expert_parallel import BALANCE, LENGTH, ROWS, ExpertParallel
from sumgrad.workloads.programs.fsdp2 import FullyShard
from sumgrad.workloads.programs.megatron import Megatron
from sumgrad.workloads.programs.pipeline import Pipeline
from sumgrad.workloads.programs.tensor_parallel import SequenceTensorParallel
from sumgrad.workloads.programs.two_pools import TwoPools
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

PLANTED: dict[str, dict[str, Any]] = {}


def _planted(workload: str, name: str, operator: str, story: str, *named: str) -> Any:
    def register(cls: type) -> type:
        PLANTED[cls.__name__] = {
            "workload": workload, "name": name, "operator": operator, "story": story,
            "named": named,
        }  # fmt: skip
        return cls

    return register


# ---- data parallelism ----------------------------------------------------------------------------


@_planted(
    "data_parallel",
    "local_mean",
    "M01",
    "each rank divides by its own tokens and the means are averaged",
    "mean_of_means",
)
class LocalMean(DataParallel):
    def global_count(self, mine):
        return mine["valid"].sum() * dist.get_world_size()


@_planted(
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


@_planted(
    "data_parallel",
    "count_positions",
    "M02",
    "the loss is divided by all positions, padding included",
    "factor",
)
class CountPositions(DataParallel):
    def global_count(self, mine):
        count = torch.tensor(mine["valid"].numel())
        dist.all_reduce(count)
        return count


@_planted(
    "data_parallel",
    "double_divide",
    "M03",
    "divided by the number of micro-batches in the loss and in the accumulator",
    "factor",
)
class DoubleDivide(DataParallel):
    def global_count(self, mine):
        return super().global_count(mine) * MICRO_BATCHES


@_planted(
    "data_parallel",
    "drop_divide",
    "M04",
    "a sum-reduced loss that nobody divides by the tokens",
    "factor",
)
class DropDivide(DataParallel):
    def global_count(self, mine):
        return torch.tensor(1)


@_planted(
    "data_parallel",
    "avg_silently_sum",
    "M24",
    "scaled for an AVG that the backend carries out as a SUM",
    "factor",
)
class AvgSilentlySum(DataParallel):
    def global_count(self, mine):
        return super().global_count(mine) / dist.get_world_size()


@_planted(
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


@_planted(
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


@_planted(
    "data_parallel",
    "reduce_on_rank_with_work",
    "M43",
    "a rank that saw no long sequence leaves a parameter out of the reduction",
    "wrong_group",
    "row_factors",
    "open",
)
class ReduceWhereUsed(DataParallel):
    def reduce(self, model):
        some = dist.new_group([0, 1])
        for name, param in model.named_parameters():
            if not name.startswith("up"):
                dist.all_reduce(param.grad)
            elif dist.get_rank() < 2:
                dist.all_reduce(param.grad, group=some)


@_planted(
    "data_parallel",
    "first_weight_broadcast",
    "M61",
    "every token's gradient is multiplied by the first token's weight",
    "open",
)
class FirstWeight(DataParallel):
    def step(self, model, batch, ctx):
        weight = batch["valid"][:, :1] | ~batch["valid"]
        super().step(model, {**batch, "valid": weight.expand_as(batch["valid"])}, ctx)


@_planted(
    "ddp",
    "ddp_average",
    "M07",
    "DDP's own average under a loss that is already divided by the global count",
    "avg",
)
class DDPAverage(DDP):
    def distribute(self, model, ctx):
        return DistributedDataParallel(model)


@_planted(
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


@_planted(
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


@_planted(
    "sequence_parallel",
    "skip_replicated_reduce",
    "M13",
    "norm gradients are partial sums over tp, and nobody sums them",
    "skipped_collective",
)
class SkipNorms(SequenceTensorParallel):
    def reduce(self, model, ctx):
        for param in model.parameters():
            grad = param.grad
            if any(p.is_partial() for p in grad.placements):
                tp = ctx.mesh["tp"]
                param.grad = DTensor.from_local(grad.to_local(), tp, [Replicate()], run_check=False)
            dist.all_reduce(param.grad.to_local(), group=ctx.group("dp"))


@_planted(
    "megatron",
    "bias_before_reduce",
    "M17",
    "the replicated bias is added on every rank before the SUM",
    "open",
)
class BiasBefore(Megatron):
    def out(self, layer, hidden, ctx):
        return self.sum_out(layer.down(hidden) + layer.bias, ctx)


@_planted(
    "megatron",
    "differentiable_bias_over_t",
    "M18",
    "every rank adds b/T before the SUM, differentiably: the bias gets 1/T",
    "factor",
)
class BiasOverT(Megatron):
    def out(self, layer, hidden, ctx):
        size = 1 if ctx is None else ctx.axes["tp"]
        return self.sum_out(layer.down(hidden) + layer.bias / size, ctx)


@_planted(
    "megatron",
    "identity_backward",
    "M19",
    "the backward of the copy into the tensor-parallel region does not sum",
    "open",
    "skipped_collective",
)
class IdentityBackward(Megatron):
    def copy_in(self, x, ctx):
        return x


class _SumBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return megatron._SumOut.forward(ctx, x, group)

    @staticmethod
    def backward(ctx, grad):
        return megatron._CopyIn.backward(ctx, grad)


@_planted(
    "megatron",
    "sum_backward",
    "M20",
    "the backward of an all-reduce all-reduces again: T^k",
    "depth_factor",
    "double_reduction",
    "open",
)
class SumBackward(Megatron):
    def sum_out(self, x, ctx):
        return x if ctx is None else _SumBoth.apply(x, ctx.group("tp"))


@_planted(
    "megatron",
    "non_differentiable_collective",
    "M21",
    "the sum of the shards is taken without autograd",
    "open",
    "missing",
)
class NoAutograd(Megatron):
    def sum_out(self, x, ctx):
        if ctx is None:
            return x
        total = x.detach().clone()
        dist.all_reduce(total, group=ctx.group("tp"))
        return total + (x - x.detach()) * (ctx.coords["tp"] == 0)


@_planted(
    "megatron",
    "index_without_offset",
    "M58",
    "the vocabulary shard is indexed with global token ids",
    "open",
)
class NoOffset(Megatron):
    def embed(self, model, tokens, ctx):
        if ctx is None:
            return model.embed(tokens)
        start, size = self.cut(megatron.VOCABULARY, ctx)
        here = (tokens >= start) & (tokens < start + size)
        return model.embed(tokens.clamp(0, size - 1)) * here[..., None]


@_planted(
    "megatron",
    "shard_local_size",
    "M59",
    "label smoothing divides by the shard's vocabulary, not by the whole",
    "open",
)
class ShardLocalSize(Megatron):
    def step(self, model, batch, ctx):
        self.parts = ctx.axes["tp"]
        super().step(model, batch, ctx)

    def token_loss(self, logits, rows):  # type: ignore[override]
        smoothing = megatron.SMOOTHING * getattr(self, "parts", 1)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), rows["targets"].flatten(), reduction="none",
            label_smoothing=smoothing,
        )  # fmt: skip
        return (loss * rows["valid"].flatten()).sum()


# ---- pipeline, context, experts, pools -----------------------------------------------------------


@_planted(
    "pipeline",
    "skip_tie_reduce",
    "M30",
    "the tied embedding is not summed over the stages that hold it",
    "skipped_collective",
)
class SkipTie(Pipeline):
    def distribute(self, model, ctx):
        model = super().distribute(model, ctx)
        self.tie = None
        return model


@_planted(
    "pipeline",
    "count_use_twice",
    "M32",
    "both uses of the tied weight deposit the joint gradient",
    "double_reduction",
    "factor",
)
class TieTwice(Pipeline):
    def reduce(self, model, ctx):
        super().reduce(model, ctx)
        if self.tie is not None:
            tied = model[0].weight if ctx.coords["pp"] == 0 else model[-1].weight
            dist.all_reduce(tied.grad, group=self.tie)


@_planted(
    "context_parallel",
    "cp_factor",
    "M10",
    "the factor cp that cancels an average over dp x cp is left in",
    "factor",
)
class CpFactor(ContextParallel):
    def global_count(self, mine, ctx):
        return super().global_count(mine, ctx) / ctx.axes["cp"]


@_planted(
    "context_parallel",
    "cp_local_denominator",
    "M11",
    "each stretch of the sequence is divided by its own tokens",
    "open",
    "local_count",
    "row_factors",
    "skipped_collective",
)
class CpLocal(ContextParallel):
    def global_count(self, mine, ctx):
        count = mine["valid"].sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        return count.clamp(min=1) * ctx.axes["cp"]


@_planted(
    "context_parallel",
    "gather_without_autograd",
    "M21",
    "keys and values of other ranks are gathered without their gradient",
    "open",
    "skipped_collective",
)
class GatherDetached(ContextParallel):
    def gather(self, ctx):
        group, size, at = ctx.group("cp"), ctx.axes["cp"], ctx.coords["cp"]

        def gather(x):
            parts = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(parts, x.detach().contiguous(), group=group)
            parts[at] = x
            return torch.cat(parts, dim=1)

        return gather


@_planted(
    "expert_parallel",
    "expert_divisor",
    "M26",
    "expert gradients are divided by the expert-parallel size",
    "factor",
)
class ExpertDivisor(ExpertParallel):
    def reduce(self, model, ctx):
        super().reduce(model, ctx)
        for param in model.experts.parameters():
            param.grad /= ctx.axes["ep"]


@_planted(
    "expert_parallel",
    "aux_scale",
    "M27",
    "the balance loss is multiplied by the ep size",
    "term_factor",
)
class AuxScale(ExpertParallel):
    def local_balance(self, model, mine):
        return super().local_balance(model, mine) * 3


@_planted(
    "expert_parallel",
    "aux_dropped",
    "M28",
    "the balance loss is not attached to the graph",
    "term_factor",
)
class AuxDropped(ExpertParallel):
    def local_balance(self, model, mine):
        return super().local_balance(model, mine).detach()


@_planted(
    "expert_parallel",
    "local_statistics",
    "M56",
    "the balance loss uses the rank's own routing counts",
    "open",
    "row_factors",
    "skipped_collective",
)
class LocalStatistics(ExpertParallel):
    def local_balance(self, model, mine):
        load = self.load(model, mine)
        sent, mass = load.chunk(2)
        own = len(mine["tokens"]) * LENGTH
        return BALANCE * len(sent) * (sent.detach() * mass).sum() / own / (ROWS * LENGTH)


@_planted(
    "two_pools",
    "per_module_dp_mismatch",
    "M09",
    "the encoder is normalised with the decoder's data-parallel size (megatron-core vision)",
    "factor",
)
class DpMismatch(TwoPools):
    def reduce(self, model, ctx):
        super().reduce(model, ctx)
        if ctx.pool == "encoder":
            for param in model.parameters():
                param.grad *= len(ctx.pools["decoder"]) / len(ctx.pools["encoder"])
