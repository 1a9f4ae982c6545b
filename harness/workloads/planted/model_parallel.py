"""Bugs in model parallelism: wrong backwards, wrong shards, terms and holders left out."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sumgrad.workloads.planted.register import planted
from sumgrad.workloads.programs import megatron
from sumgrad.workloads.programs.context_parallel import ContextParallel
from sumgrad.workloads.programs.expert_parallel import BALANCE, LENGTH, ROWS, ExpertParallel
from sumgrad.workloads.programs.megatron import Megatron
from sumgrad.workloads.programs.pipeline import Pipeline
from sumgrad.workloads.programs.tensor_parallel import SequenceTensorParallel
from sumgrad.workloads.programs.two_pools import TwoPools
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


@planted(
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


@planted(
    "megatron",
    "bias_before_reduce",
    "M17",
    "the replicated bias is added on every rank before the SUM",
    "open",
    "forward",
)
class BiasBefore(Megatron):
    def out(self, layer, hidden, ctx):
        return self.sum_out(layer.down(hidden) + layer.bias, ctx)


@planted(
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


@planted(
    "megatron",
    "identity_backward",
    "M19",
    "the backward of the copy into the tensor-parallel region does not sum",
    "open",
    "skipped_collective",
    "backward",
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


@planted(
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


@planted(
    "megatron",
    "non_differentiable_collective",
    "M21",
    "the sum of the shards is taken without autograd",
    "open",
    "missing",
    "backward",
)
class NoAutograd(Megatron):
    def sum_out(self, x, ctx):
        if ctx is None:
            return x
        total = x.detach().clone()
        dist.all_reduce(total, group=ctx.group("tp"))
        return total + (x - x.detach()) * (ctx.coords["tp"] == 0)


@planted(
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


@planted(
    "megatron",
    "shard_local_size",
    "M59",
    "label smoothing divides by the shard's vocabulary, not by the whole",
    "open",
    "backward",
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


@planted(
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


@planted(
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


@planted(
    "context_parallel",
    "cp_factor",
    "M10",
    "the factor cp that cancels an average over dp x cp is left in",
    "factor",
)
class CpFactor(ContextParallel):
    def global_count(self, mine, ctx):
        return super().global_count(mine, ctx) / ctx.axes["cp"]


@planted(
    "context_parallel",
    "cp_local_denominator",
    "M11",
    "each stretch of the sequence is divided by its own tokens",
    "open",
    "local_count",
    "row_factors",
    "skipped_collective",
    "loss_weights",
)
class CpLocal(ContextParallel):
    def global_count(self, mine, ctx):
        count = mine["valid"].sum()
        dist.all_reduce(count, group=ctx.group("dp"))
        return count.clamp(min=1) * ctx.axes["cp"]


@planted(
    "context_parallel",
    "gather_without_autograd",
    "M21",
    "keys and values of other ranks are gathered without their gradient",
    "open",
    "skipped_collective",
    "backward",
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


@planted(
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


@planted(
    "expert_parallel",
    "aux_scale",
    "M27",
    "the balance loss is multiplied by the ep size",
    "term_factor",
)
class AuxScale(ExpertParallel):
    def local_balance(self, model, mine):
        return super().local_balance(model, mine) * 3


@planted(
    "expert_parallel",
    "aux_dropped",
    "M28",
    "the balance loss is not attached to the graph",
    "term_factor",
    "loss_weights",
)
class AuxDropped(ExpertParallel):
    def local_balance(self, model, mine):
        return super().local_balance(model, mine).detach()


@planted(
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


@planted(
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
