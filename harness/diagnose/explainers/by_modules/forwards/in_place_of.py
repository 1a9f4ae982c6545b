"""A module that is called in place of another that is like it, in words."""

from __future__ import annotations

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import looked, unless_it_fails
from sumgrad.diagnose.modules.values.seen import TOLERANCES
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong, met_first
from sumgrad.diagnose.modules.where.in_place_of import in_place_of


@unless_it_fails
def in_place_of_in_words(case: Case, found: FirstWrong) -> str | None:
    """Where a module is called in place of another that is like it."""
    traces, dtype = case.traces, case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64":
        return None
    other = in_place_of(traces, found.wrong, found.ranks, TOLERANCES[dtype])
    if other is None and (look := looked(case)) is not None:
        found = met_first(look, found)
        other = in_place_of(traces, found.wrong, found.ranks, TOLERANCES[dtype])
    if other is None:
        return None
    ours, theirs = found.wrong.split("."), other.split(".")
    outer = max(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b) + 1
    mine, its = (".".join(name[:outer]) for name in (ours, theirs))
    return (
        f"what goes into {found.wrong} there goes into {other} in the single process: {mine} is "
        f"called in place of {its}, or is handed what belongs to that"
    )
