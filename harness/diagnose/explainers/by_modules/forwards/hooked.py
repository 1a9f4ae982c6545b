"""Hooks of modules that make something wrong of what is right, in words."""

from __future__ import annotations

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.forwards.entering import (
    entered_wrong,
    into_the_calls,
    what_goes_into,
)
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    line_and_code,
    named,
    traces_looked_at,
)
from sumgrad.diagnose.modules.autograd.hooked import hooks_that_change
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look

MOST_SHOWN = 3


@as_a_hint
def changed_by_hooks(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """The hooks that see what a module returns, or what it is called with, where that is right
    before they do and wrong after."""
    traces = traces_looked_at(case)
    if traces is None:
        return []
    entered = entered_wrong(case, found)
    if not entered and what_goes_into(case, found) != "right":
        return []
    into = {} if entered else {(s.rank, s.call.number): s.rows for s in into_the_calls(case, found)}
    dtype = case.record.spec.tiers[case.tier]
    lines = hooks_that_change(traces, entered or found.seen, dtype, into)
    if not lines:
        return []
    shown = ", ".join(line_and_code(*line) for line in lines[:MOST_SHOWN])
    more = f" and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
    plural = "s" if len(lines) > 1 else ""
    what, hook = "what the forward of {} returns", "forward hook"
    if entered:
        what, hook = "what {} is called with", "forward pre-hook"
    return [
        f"{what.format(named(look, found.wrong))} is right, and another after its {hook}{plural} "
        f"saw it, on rank {spans(found.ranks)}: {shown}{more}"
    ]
