"""Causes that the ledger of one failed step shows, whatever the numbers say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.factors import explained, in_the_gradients
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.reductions import carried_by, reductions_of, wrong_parameters
from sumgrad.judge.joint import Joint, counts_again, describe, joint_operations

NARROW = ("bfloat16", "float16")


def shown_by_the_ledger(case: Case, left: Left) -> Iterator[Explanation]:
    """What the ledger of the failed step shows, and the factors as evidence beside it."""
    found = None if case.has_plan else cause_in_ledger(case)
    if found is not None:
        because = (*found.because, *in_the_gradients(case))
        yield explained(case, replace(found, because=because))


def cause_in_ledger(case: Case) -> Diagnosis | None:
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
        apart = _different_parameters(joint)
        if apart is not None:
            return _ledger_cause(
                "other_parameters", f"{words} adds up gradients of different parameters: {apart}",
                "a group of ranks that do not hold the same", joint,
            )  # fmt: skip
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
        if counts_again(joint):
            return _ledger_cause(
                "double_reduction",
                f"{words} sums the same bits from all its ranks: what is already whole",
                "",
                joint,
            )
    return None


def _different_parameters(joint: Joint) -> str | None:
    """Two ranks whose own gradients enter one sum, of parameters that they do not share."""
    if joint.family != "allreduce":
        return None
    by_rank: dict[int, set[str]] = {}
    for name, ranks in joint.gradients().items():
        for rank in ranks:
            by_rank.setdefault(rank, set()).add(name)
    for a, b in combinations(sorted(by_rank), 2):
        if not by_rank[a] & by_rank[b]:
            return f"rank {a}'s {min(by_rank[a])} and rank {b}'s {min(by_rank[b])}"
    return None


def _odd_group(case: Case, joint: Joint) -> bool:
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
