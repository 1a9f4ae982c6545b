"""One factor on all gradients that a reduction makes: of gradients, or of what divides them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.reductions import CLOSE, carried_by, reductions_of
from sumgrad.judge.joint import Joint, describe, identical, prescaled, sizes_of
from sumgrad.ledger.operations import group_name

DDP_DIVIDES = (
    "DistributedDataParallel divides by its {0} ranks what it sums, unless a hook does otherwise: "
    "multiply the loss by {0}, or register a hook that sums (sumgrad.convention.ddp_sum_hook)"
)

FSDP_AVERAGES = (
    "where it is FSDP2's, set_gradient_divide_factor(1.0) on each module it shards makes it a "
    "sum, on gloo with set_force_sum_reduction_for_comms(True)"
)


def by_a_reduction(
    case: Case, names: Sequence[str], value: float, shown: str, fits: str
) -> Diagnosis | None:
    """A reduction that carried these gradients and makes the factor: by an average, or twice."""
    record, sizes = case.record, sizes_of(case.record)
    for joint in reductions_of(case):
        if not set(carried_by(case, joint)) & set(names):
            continue
        size, words = len(joint.ranks), describe(record, joint)
        symbol = f"1/{group_name(record.spec.topology, joint.ranks)}"
        if joint.first.get("reduce") == "AVG" and abs(value * size - 1) < CLOSE:
            return _avg(f"{words} averages (AVG) where the law sums", shown, symbol, fits, joint)
        scaled = prescaled(joint, sizes)
        if scaled and abs(scaled[0] - value) < CLOSE:
            text = f"the gradients enter {words} already multiplied by {scaled[0]:.6g}"
            found = _avg(f"{text}, which makes the SUM an average", shown, symbol, fits, joint)
            by_ddp = [DDP_DIVIDES.format(size)] * any(r.ddp for r in record.ranks.values())
            return replace(found, because=(*found.because, *by_ddp))
        if identical(joint) and abs(value - size) < CLOSE * size:
            beside = _ranks_of_others(case, joint, names)
            also = f"; so are those of ranks {spans(beside)}" if beside else ""
            return Diagnosis(
                cause=f"{words} sums what is already whole: it is counted {size} times",
                kind="double_reduction",
                standing="proved",
                ranks=tuple(sorted({*joint.ranks, *beside})),
                factor=shown,
                symbol=group_name(record.spec.topology, joint.ranks),
                because=(fits, f"its inputs are the same bits on all {size} ranks{also}"),
            )
    return _averaged_in_another_tier(case, names, value, shown, fits)


def _averaged_in_another_tier(
    case: Case, names: Sequence[str], value: float, shown: str, fits: str
) -> Diagnosis | None:
    """FSDP averages in float32 alone: in float64 it divides before its sum, and once more after."""
    for tier in case.record.spec.tiers:
        for joint in reductions_of(case, tier) if tier != case.tier else ():
            carries_them = set(carried_by(case, joint, tier)) & set(names)
            averages = joint.first.get("reduce") == "AVG"
            if carries_them and averages and abs(value * len(joint.ranks) - 1) < CLOSE:
                symbol = f"1/{group_name(case.record.spec.topology, joint.ranks)}"
                words = f"{describe(case.record, joint)} averages (AVG) where the law sums"
                found = _avg(words, shown, symbol, fits, joint)
                return replace(found, because=(fits, f"the ledger of the {tier} tier shows AVG at "
                                               f"{joint.site}", FSDP_AVERAGES))  # fmt: skip
    return None


def _ranks_of_others(case: Case, joint: Joint, names: Sequence[str]) -> list[int]:
    """Ranks of other groups of the same axis that sum the same gradients, whole already, too."""
    topology = case.record.spec.topology
    alike = [
        other
        for other in reductions_of(case)
        if {*other.ranks}.isdisjoint(joint.ranks)
        and group_name(topology, other.ranks) == group_name(topology, joint.ranks)
        and len(other.ranks) == len(joint.ranks)
        and identical(other)
        and set(carried_by(case, other)) & set(names)
    ]
    return sorted({rank for other in alike for rank in other.ranks})


def by_a_counts_reduction(case: Case, value: float, shown: str, fits: str) -> Diagnosis | None:
    """A reduction of a count that all gradients are divided by: repeated, or averaged.

    By its value: what the ranks put in is a term's count, whole or in parts.
    """
    counts = [float(count) for count in case.reference.counts.values()]
    for joint in reductions_of(case):
        size, words = len(joint.ranks), describe(case.record, joint)
        scalars = [float(e["scalar"]) for e in joint.events.values() if "scalar" in e]
        if size < 2 or len(scalars) < size or carried_by(case, joint):
            continue
        axis = group_name(case.record.spec.topology, joint.ranks)
        whole = any(abs(scalars[0] - count) < CLOSE * count for count in counts)
        in_parts = any(abs(sum(scalars) - count) < CLOSE * count for count in counts)
        if whole and identical(joint) and abs(value * size - 1) < CLOSE:
            return Diagnosis(
                cause=f"{words} sums what is already whole; every gradient is divided by it",
                kind="double_reduction",
                standing="proved",
                ranks=joint.ranks,
                factor=shown,
                symbol=f"1/{axis}",
                because=(fits, f"its inputs are the same bits on all {size} ranks"),
            )
        total = sum(scalars)
        for count in counts if joint.first.get("reduce") == "SUM" and total else ():
            if abs(value * total - count) < CLOSE * count and abs(total - count) > CLOSE * count:
                return Diagnosis(
                    cause=f"every gradient is divided by {total:g}, the sum that {words} gives; "
                    f"the count of the full batch is {count:g}",
                    kind="wrong_count",
                    standing="proved",
                    ranks=joint.ranks,
                    factor=shown,
                    because=(fits,),
                )
        averaged = joint.first.get("reduce") == "AVG" and abs(value - size) < CLOSE * size
        if averaged and in_parts:
            cause = f"{words} averages a count that every gradient is divided by"
            return _avg(cause, shown, axis, fits, joint)
    return None


def _avg(cause: str, shown: str, symbol: str, fits: str, joint: Joint) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        kind="avg",
        standing="proved",
        ranks=joint.ranks,
        factor=shown,
        symbol=symbol,
        because=(fits, f"the ledger shows {joint.first.get('reduce')} at {joint.site}"),
    )
