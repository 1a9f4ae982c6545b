"""Causes that the ledger of one failed step shows, whatever the numbers say."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import combinations

import torch
from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained, fitted, in_the_gradients
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.own_gradients import given_by_ranks
from sumgrad.diagnose.reductions import CLOSE, carried_by, reductions_of, wrong_parameters
from sumgrad.judge.cells import Cell
from sumgrad.judge.joint import Joint, counts_again, describe, joint_operations, takes

NARROW = ("bfloat16", "float16")
# Largest rounding of each; a gradient may be off by so many times it, or by so small a part of it.
COARSE = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
MOST_ABOVE, MOST_BELOW = 32, 1e4


def shown_by_the_ledger(case: Case, left: Left) -> Iterator[Explanation]:
    """What the ledger of the failed step shows, and the factors as evidence beside it."""
    found = None if case.has_plan else cause_in_ledger(case)
    if found is not None:
        because = (*found.because, *in_the_gradients(case))
        yield explained(case, replace(found, because=because))


def runs_narrow(case: Case, left: Left) -> Iterator[Explanation]:
    """A collective in fewer digits than all else of a tier, where as many digits are right.

    Of whatever it carries: a weight that is gathered, an activation. Single numbers are often only
    for a log.
    """
    record = case.record
    if case.has_plan or record.spec.tiers[case.tier] != "float64" or fitted(case) is not None:
        return  # roundings are no factors
    off = max((_relative_error(cell) for cell in case.failing_cells), default=0.0)
    found: dict[str, list[Joint]] = {}
    for joint in joint_operations(record, case.tier, case.step):
        dtypes = {str(e["dtype"]) for e in joint.events.values()} & set(COARSE)
        if dtypes and int(joint.first.get("numel") or 0) > 1 and len(joint.ranks) > 1:
            found.setdefault(min(dtypes), []).append(joint)
    for dtype, joints in found.items():
        if not COARSE[dtype] / MOST_BELOW <= off <= COARSE[dtype] * MOST_ABOVE:
            continue
        words = describe(record, joints[0])
        more = f" (and {len(joints) - 1} more)" if len(joints) > 1 else ""
        cause = f"{words}{more} runs in {dtype}"
        because = (
            f"all else of the {case.tier} tier is float64",
            f"the gradients are off by {off:.1g} of themselves, as {dtype} leaves them",
        )
        ranks = tuple(sorted({rank for joint in joints for rank in joint.ranks}))
        yield explained(
            case, Diagnosis(cause=cause, kind="low_precision", ranks=ranks, because=because)
        )


def _relative_error(cell: Cell) -> float:
    wanted = float(cell.wanted.value.norm())
    return float((cell.measured - cell.wanted.value).norm()) / wanted if wanted else 0.0


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
            told = _ledger_cause(
                "other_parameters", f"{words} adds up gradients of different parameters: {apart}",
                "a group of ranks that do not hold the same", joint,
            )  # fmt: skip
            beside = [j for j in reductions_of(case) if j.site == joint.site]
            ranks = {r for j in beside if _different_parameters(j) is not None for r in j.ranks}
            return replace(told, ranks=tuple(sorted(ranks)))
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
        something_else = _something_else_goes_in(case, joint, words, wrong)
        if something_else is not None:
            return something_else
        if counts_again(joint) and _are_finite(case, wrong & {*carried_by(case, joint)}):
            return _ledger_cause(
                "double_reduction",
                f"{words} sums the same bits from all its ranks: what is already whole",
                "",
                joint,
            )
    return None


def _are_finite(case: Case, names: Collection[str]) -> bool:
    """Whether these gradients are numbers: ranks that have none have the same bits by chance."""
    return all(bool(torch.isfinite(c.measured).all()) for c in case.cells if c.name in names)


def something_else_goes_in(case: Case) -> tuple[str, ...]:
    """In words: the first reduction of a wrong gradient into which a rank puts something else."""
    wrong = wrong_parameters(case)
    found = (
        _something_else_goes_in(case, joint, describe(case.record, joint), wrong)
        for joint in reductions_of(case)
    )
    return tuple(cause.cause for cause in found if cause is not None)[:1]


def _times(factors: set[float]) -> str:
    """Of the one factor with which they put it in, where it is another than one."""
    (factor,) = factors
    return (
        ""
        if abs(factor - 1) < CLOSE
        else f", times {as_fraction(factor, CLOSE) or f'{factor:.6g}'}"
    )


def _something_else_goes_in(
    case: Case, joint: Joint, words: str, wrong: set[str]
) -> Diagnosis | None:
    """Some ranks put their own gradient into a reduction, by its values, and others do not."""
    for name, own in joint.gradients().items():
        others = [r for r, e in joint.events.items() if r not in own and e.get("grads") == []]
        factors = {round(c, 9) for c in own.values()}
        if name not in wrong or not others or len(factors) > 1 or len(own) < len(others):
            continue
        zeros = [r for r in others if joint.events[r].get("nonzero") is False]
        if zeros and _has_none(case, name, zeros):
            continue
        if zeros:
            kind, ranks = "lost_contribution", zeros
            cause = f"puts zeros into {words}, where others put their own gradient of {name}"
            because = "a rank that has nothing to give is right to: then look elsewhere"
        elif all(_takes_a_sum(case, r, joint) for r in others):
            ranks = sorted(own)
            alone = _before_it_alone(case, joint, name, ranks)
            if alone is None:
                kind, lacks, because = "skipped_collective", "that one is missing", ""
            else:
                kind, lacks = "wrong_group", "its own is over one rank"
                because = f"its group is one rank at {alone.site}"
            cause = (f"puts its own gradient of {name} into {words}, where rank {spans(others)} "
                     f"puts what a reduction before it gave: {lacks}")  # fmt: skip
        else:
            kind, ranks = "changed_input", others
            cause = (f"puts something else into {words} than the gradient of {name} that its "
                     f"backward gave; others put theirs{_times(factors)}")  # fmt: skip
            because = "what is left in a buffer from before, or is not there yet, looks like this"
        told = _ledger_cause(kind, f"rank {spans(ranks)} {cause}", because, joint)
        return replace(told, ranks=tuple(ranks))
    return None


def _before_it_alone(case: Case, joint: Joint, name: str, ranks: Collection[int]) -> Joint | None:
    """A reduction of this gradient before it that each of these ranks issued for itself."""
    found = {
        other.ranks[0]: other
        for other in reductions_of(case)
        if len(other.ranks) == 1
        and name in other.gradients()
        and other.ranks[0] in ranks
        and other.first["n"] < joint.events[other.ranks[0]]["n"]
    }
    return next(iter(found.values())) if {*found} == {*ranks} else None


def _takes_a_sum(case: Case, rank: int, joint: Joint) -> bool:
    """Whether what a rank puts in is what a reduction before gave it."""
    held = case.record.ranks.get(rank)
    before = held.events.get((case.tier, case.step), ()) if held is not None else ()
    event = joint.events[rank]
    return any(takes(event, e) for e in before if e["n"] < event["n"])


def _has_none(case: Case, name: str, ranks: list[int]) -> bool:
    """Whether the backwards of all these ranks are known to have given nothing for a parameter."""
    given = given_by_ranks(case)
    if given is None:
        return False
    own = [given[rank][0].get(name) for rank in ranks if rank in given]
    return all(passes is None or not bool(passes.any()) for passes in own)


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
