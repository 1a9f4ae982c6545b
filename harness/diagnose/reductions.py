"""The reductions of a failed step, and which of them carried a wrong gradient."""

from __future__ import annotations

from sumgrad.diagnose.case import Case
from sumgrad.judge.joint import Joint, carried, carries, describe, entering, joint_operations
from sumgrad.ledger.operations import REDUCTIONS

CLOSE = 1e-6  # a coefficient this near to a number is that number


def reductions_of(case: Case, tier: str | None = None) -> list[Joint]:
    """Every reduction of the failed step, as its members issued it. tier: another one."""
    found = joint_operations(case.record, tier or case.tier, case.step)
    return [joint for joint in found if joint.family in REDUCTIONS]


def carried_by(case: Case, joint: Joint, tier: str | None = None) -> list[str]:
    """Parameters whose gradients enter or leave a reduction."""
    return carries(joint, carried(case.record, tier or case.tier, case.step))


def entered_by(case: Case, joint: Joint) -> set[str]:
    """Parameters whose gradients go into a reduction."""
    return set(carries(joint, entering(case.record, case.tier, case.step)))


def wrong_parameters(case: Case) -> set[str]:
    """Parameters whose gradient is wrong on some rank."""
    return {cell.name for cell in case.failing_cells}


def empty_handed(case: Case) -> tuple[list[int], str] | None:
    """Ranks whose input to a reduction of a wrong gradient is zeros, while others' is not."""
    wrong = wrong_parameters(case)
    for joint in reductions_of(case):
        if not wrong & set(carried_by(case, joint)):
            continue
        idle = [r for r, e in joint.events.items() if e.get("nonzero") is False]
        if idle and len(idle) < len(joint.events):
            return idle, describe(case.record, joint)
    return None


def scaled_by(case: Case, factor: float) -> list[int]:
    """Ranks whose own part of a wrong gradient enters a reduction with this factor."""
    out, wrong = set(), wrong_parameters(case)
    for joint in reductions_of(case):
        for name, by_rank in joint.gradients().items():
            if name in wrong:
                out |= {r for r, c in by_rank.items() if abs(c - factor) < CLOSE}
    return sorted(out) if len(out) < len(case.record.ranks) else []
