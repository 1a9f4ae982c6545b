"""The catalogue of fault operators: each real way to get a gradient wrong, and how it is planted.

What it is: data, without torch. An operator names a report it is known from, where it can be seen,
and the planted faults that stand for it: plan faults (three_pool), kinds of collective faults,
step faults and variants of the shipped Programs. Where it has no meaning here it says why.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """story: what goes wrong; report: a public one. visible: what a topology or batch needs.

    planted: names of faults; empty where `why_not` says why there is none.
    """

    id: str
    story: str
    report: str
    visible: str
    planted: tuple[str, ...] = ()
    why_not: str = ""


def _op(
    id: str, story: str, report: str, visible: str, *planted: str, why_not: str = ""
) -> Operator:
    return Operator(
        id=id, story=story, report=report, visible=visible, planted=planted, why_not=why_not
    )


OPERATORS = (
    _op("M01", "local means averaged with equal weight", "transformers PR 34191", "unequal counts",
        "local_mean", "micro_batch_mean"),
    _op("M02", "divided by positions, padding included", "no public report", "padding",
        "count_positions"),
    _op("M03", "divided by the micro-batches twice", "accelerate issue 3533", "micro-batches > 1",
        "double_divide"),
    _op("M04", "never divided by the tokens", "transformers issue 46731", "a summed loss",
        "drop_divide"),
    _op("M07", "SUM where AVG is meant, or the reverse", "transformers PR 40610", "a group > 1",
        "avg_on_ci", "avg", "times_world", "ddp_average", "fsdp_average"),
    _op("M08", "divided by the size of another group", "pytorch issue 36516", "two axes > 1",
        "divide_by_ci_count", "divide_by_world"),
    _op("M09", "one module normalised with another's data parallelism", "Megatron-Bridge PR 4066",
        "unequal pools", "per_module_dp_mismatch", "block_over_ci_size"),
    _op("M10", "a factor of the context-parallel degree too many", "Megatron-LM issue 906",
        "cp > 1", "cp_factor"),
    _op("M11", "each stretch of the sequence divided by its own tokens", "prime-rl PR 1960",
        "unequal masks", "cp_local_denominator"),
    _op("M13", "a replicated parameter is not reduced over an axis", "Megatron-LM issue 1446",
        "the axis > 1", "skip_block_reduce", "skip", "skip_replicated_reduce"),
    _op("M15", "reduced twice", "Megatron-LM issue 775", "a group > 1", "double",
        "faith_on_all_ranks"),
    _op("M17", "a replicated bias added before the SUM", "Paddle PR 35186", "tp > 1",
        "bias_before_reduce"),
    _op("M18", "b/T added differentiably on every rank", "torchtitan PR 4332", "tp > 1",
        "differentiable_bias_over_t"),
    _op("M19", "the backward of a collective does not sum", "jax issue 3970", "tp > 1",
        "identity_backward"),
    _op("M20", "the backward of a collective sums once more", "open_clip issue 616", "tp > 1",
        "sum_backward", "imp_differentiable_sum"),
    _op("M21", "a collective without autograd in the forward", "ms-swift PR 9947", "tp or cp > 1",
        "non_differentiable_collective", "gather_without_autograd"),
    _op("M23", "a copy is reduced", "Megatron-LM issue 5337", "a group > 1", "copy"),
    _op("M24", "the backend carries AVG out as SUM", "pytorch issue 162338", "a group > 1",
        "avg_silently_sum"),
    _op("M25", "the result of a collective is dropped", "ltp-megatron-lm PR 68", "a group > 1",
        "drop_return_value", "drop", "drop_message"),
    _op("M26", "expert gradients divided by the wrong group", "DeepSpeed PR 6546", "ep > 1",
        "expert_divisor"),
    _op("M27", "the auxiliary loss is scaled by a group size", "Megatron-LM PR 5047",
        "a coefficient > 0", "aux_scale"),
    _op("M28", "the auxiliary loss is not in the graph", "Megatron-LM issue 1617",
        "a coefficient > 0", "aux_dropped"),
    _op("M30", "a tied weight is not summed over its holders", "Megatron-LM issue 656", "pp > 1",
        "skip_tie_reduce"),
    _op("M32", "both uses of a shared weight deposit the joint gradient", "pytorch PR 181365",
        "a weight used twice", "count_use_twice"),
    _op("M34", "the accumulator is cleared by every micro-batch", "open-instruct PR 1498",
        "micro-batches > 1", "keep_last_microbatch"),
    _op("M35", "added after the reduction, or reduced before it is there", "DeepSpeed PR 7985",
        "a group > 1", "add_after_reduce", "early"),
    _op("M37", "a reused buffer is not zeroed", "Megatron-LM issue 950", "a second step",
        "stale_buffer", "stale"),
    _op("M38", "reduced with the first micro-batch; later ones stay local", "DeepSpeed issue 4879",
        "micro-batches > 1", "sync_first_only"),
    _op("M40", "HSDP: only the last micro-batch crosses the replicas", "pytorch PR 125484",
        "two axes", why_not="inside fully_shard; its effect is `skip:allreduce@replicate` on hsdp"),
    _op("M41", "read before the work is done", "DeepSpeed issue 6351", "overlap", "missing_wait"),
    _op("M43", "a rank without work leaves a parameter out", "pytorch issue 128949", "uneven work",
        "reduce_on_rank_with_work", "subgroup"),
    _op("M45", "recompute draws new dropout masks", "pytorch issue 121212",
        "dropout under checkpointing",
        why_not="no shipped Program draws random numbers in its step"),
    _op("M46", "recompute reads a cache that the forward changed", "transformers issue 28056",
        "a stateful layer", why_not="no shipped Program has a stateful layer"),
    _op("M48", "one dropout seed on all shards, or another on replicas", "transformers issue 31412",
        "dropout", why_not="no shipped Program draws random numbers in its step"),
    _op("M50", "replicas start from other weights", "torchtitan issue 166", "a replica",
        "unsynchronised_init"),
    _op("M52", "replicated norms counted once for each rank", "TransformerEngine PR 715",
        "an active clip", "clip_with_replicas_counted"),
    _op("M53", "the norm of a shard is not reduced", "DeepSpeed PR 5259", "an active clip",
        "clip_by_local_norm"),
    _op("M54", "only rank 0 clips", "DeepSpeed PR 1801", "an active clip", "clip_on_rank_0"),
    _op("M56", "batch statistics of a shard", "pytorch issue 64039", "a group > 1",
        "imp_local_statistic", "local_statistics"),
    _op("M58", "a shard indexed with global ids", "torchtitan PR 4637", "tp > 1",
        "index_without_offset"),
    _op("M59", "a shard's size in a formula of the whole", "Megatron-LM issue 737", "tp > 1",
        "shard_local_size"),
    _op("M61", "every token gets the first one's weight", "Liger-Kernel PR 1298", "uneven weights",
        "first_weight_broadcast"),
    _op("M62", "attention leaks over a packing boundary", "functionary issue 265", "packing",
        why_not="no shipped Program packs sequences; `sumgrad ops` has packing for the kernels"),
    _op("M64", "the reduction runs in bfloat16", "pytorch issue 106395", "a group > 1",
        "low_precision"),
    _op("M65", "summed in float16 before dividing: overflow", "pytorch PR 57410",
        "gradients above 65504",
        why_not="no shipped gradient is that large; `low_precision` stands for the narrow sum"),
    _op("M66", "another order of summation in each run", "flash-attention issue 414",
        "the bitwise tier",
        why_not="noise of one rounding is no wrong gradient; `sumgrad ops` has planted_order"),
    _op("M67", "kernels whose bits depend on the batch's shape", "TransformerEngine issue 2986",
        "the bitwise tier",
        why_not="noise of one rounding is no wrong gradient; `sumgrad ops` shows it for torch's"),
)  # fmt: skip


def operators_of(fault: str) -> list[str]:
    """Operators that a planted fault stands for. fault: a name, or KIND:TARGET of a collective."""
    name = fault.partition(":")[0]
    return [operator.id for operator in OPERATORS if name in operator.planted]


# The kind of cause that a diagnosis names -> the operator it resembles.
RESEMBLES = {
    "avg": "M07",
    "mean_of_means": "M01",
    "local_count": "M01",
    "double_reduction": "M15",
    "missing_wait": "M41",
    "stale_buffer": "M37",
    "low_precision": "M64",
    "depth_factor": "M20",
    "other_weights": "M50",
}


def resembles(kind: str) -> str | None:
    """`resembles M07, as in transformers PR 40610: ...` for a kind of cause, if one is known."""
    known = {operator.id: operator for operator in OPERATORS}
    if kind not in RESEMBLES:
        return None
    operator = known[RESEMBLES[kind]]
    return f"resembles {operator.report}: {operator.story} ({operator.id})"


def to_markdown() -> str:
    """The catalogue as the table of docs/faults.md."""
    lines = [
        "| operator | what goes wrong | a public report | visible with | planted as |",
        "|---|---|---|---|---|",
    ]
    for op in OPERATORS:
        planted = ", ".join(f"`{name}`" for name in op.planted) or f"not planted: {op.why_not}"
        lines.append(f"| {op.id} | {op.story} | {op.report} | {op.visible} | {planted} |")
    return "\n".join(lines) + "\n"
