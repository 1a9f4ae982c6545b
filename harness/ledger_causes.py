"""Causes that the ledger of one failed step shows, whatever the numbers say."""

from __future__ import annotations

from sumgrad.ledger_checks import Joint, carries, describe, fed, identical, joint_operations
from sumgrad.operations import REDUCTIONS
from sumgrad.program_fit import CLOSE, FailedStep
from sumgrad.verdict import Diagnosis

NARROW = ("bfloat16", "float16")


def reductions_of(case: FailedStep) -> list[Joint]:
    """Every reduction of the failed step, as its members issued it."""
    found = joint_operations(case.record, case.tier, case.step)
    return [joint for joint in found if joint.family in REDUCTIONS]


def carried_by(case: FailedStep, joint: Joint) -> list[str]:
    """Parameters whose gradients enter or leave a reduction."""
    return carries(joint, fed(case.record, case.tier, case.step))


def wrong_parameters(case: FailedStep) -> set[str]:
    """Parameters whose gradient is wrong on some rank."""
    return {cell.name for cell in case.failing()}


def cause_in_ledger(case: FailedStep) -> Diagnosis | None:
    """What no coefficient explains may still be written in the ledger.

    Only of reductions that carried a wrong gradient, by its values: a scalar for a log, a map of
    used parameters or a sum of the forward that looks odd is no evidence.
    """
    record, wrong = case.record, wrong_parameters(case)
    for joint in reductions_of(case):
        if not wrong & set(carried_by(case, joint)):
            continue
        words = describe(record, joint)
        if len(joint.ranks) < 2:
            if _odd_group(case, joint):
                return _ledger_cause(
                    "wrong_group", f"{words} has a group of one of its members", "", joint
                )
            continue
        dtypes = {str(e["dtype"]) for e in joint.events.values()}
        narrow = dtypes & set(NARROW) if record.spec.tiers[case.tier] not in NARROW else set()
        if narrow:
            return _ledger_cause(
                "low_precision",
                f"{words} runs in {narrow.pop()}",
                f"everything else of the {case.tier} tier is {record.spec.tiers[case.tier]}",
                joint,
            )
        if _odd_group(case, joint):
            return _ledger_cause(
                "wrong_group", f"{words} leaves members of its group out", "", joint
            )
        if joint.first.get("reduce") == "AVG":
            return _ledger_cause("avg", f"{words} averages where others sum", "", joint)
        if identical(joint):
            return _ledger_cause(
                "double_reduction",
                f"{words} sums the same bits from all its ranks: what is already whole",
                "",
                joint,
            )
    return None


def _odd_group(case: FailedStep, joint: Joint) -> bool:
    """Whether one process group appears in the ledger with other members elsewhere."""
    own = str(joint.first.get("pg", ""))
    return any(
        str(other.first.get("pg", "")) == own and set(joint.ranks) < set(other.ranks)
        for other in joint_operations(case.record, case.tier, case.step)
    )


def _ledger_cause(kind: str, cause: str, because: str, joint: Joint) -> Diagnosis:
    return Diagnosis(
        cause=cause,
        kind=kind,
        ranks=joint.ranks,
        because=tuple(filter(None, (f"the ledger shows it at {joint.site}", because))),
        however=("how often each row is counted in the gradient was not recovered",),
    )


def empty_handed(case: FailedStep) -> tuple[list[int], str] | None:
    """Ranks whose input to a reduction of a wrong gradient is zeros, while others' is not."""
    wrong = wrong_parameters(case)
    for joint in reductions_of(case):
        if not wrong & set(carried_by(case, joint)):
            continue
        idle = [r for r, e in joint.events.items() if e.get("nonzero") is False]
        if idle and len(idle) < len(joint.events):
            return idle, describe(case.record, joint)
    return None


def scaled_by(case: FailedStep, factor: float) -> list[int]:
    """Ranks whose own part of a wrong gradient enters a reduction with this factor."""
    out, wrong = set(), wrong_parameters(case)
    for joint in reductions_of(case):
        for name, by_rank in joint.gradients().items():
            if name in wrong:
                out |= {r for r, c in by_rank.items() if abs(c - factor) < CLOSE}
    return sorted(out) if len(out) < len(case.record.ranks) else []
