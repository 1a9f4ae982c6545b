"""What the output of the first wrong module has too much of, or lacks, in words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.gradient_of_others import factor_beside
from sumgrad.diagnose.explainers.by_modules.backwards.missing_sum import kept_in_words
from sumgrad.diagnose.explainers.by_modules.between import SUMS, issued_between
from sumgrad.diagnose.explainers.by_modules.forwards.entering import into_the_calls, what_goes_into
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    traces_looked_at,
    unless_it_fails,
)
from sumgrad.diagnose.modules.how_wrong.counted_once import counted_once
from sumgrad.diagnose.modules.how_wrong.surplus import Surplus, surplus, surplus_back
from sumgrad.diagnose.modules.values.seen import TOLERANCES
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.names import axis_groups
from sumgrad.record.trace import INTO

ONCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TooMuch:
    """What is in the output too often, or too rarely, in words; because: what it was seen by."""

    cause: str
    because: tuple[str, ...]


@unless_it_fails
def too_much(case: Case, found: FirstWrong) -> TooMuch | None:
    """Of a module that is handed what is right; None where no one thing explains all of it."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64" or what_goes_into(case, found) != "right":
        return None
    one = surplus(traces, found.seen, into_the_calls(case, found), TOLERANCES[dtype])
    if one is None:
        return None
    gives = f"what {found.wrong or 'the model'} gives"
    what = one.name if one.of == "parameter" or one.name.startswith(INTO) else (
        f"what {one.name or 'the model'} gives")  # fmt: skip
    if abs(one.times + 1) < ONCE:
        cause = f"{what} is lacking in {gives}"
    elif one.times < 0:
        cause = f"{fraction_of(-one.times)} times {what} is lacking in {gives}"
    else:
        cause = f"{gives} has {what} {_so_often(one.times)} more than it should"
    because = [*_by_each_rank(case, found, one), *_lines_with(case, found, one)]
    return TooMuch(cause=cause, because=tuple(because))


@unless_it_fails
def whole_on_each(case: Case, found: FirstWrong) -> str:
    """Where outputs are parts of a sum, and what a line gives is whole in each; or nothing."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64":
        return ""
    whole = by_module(traces.single, found.wrong.__eq__)
    one = counted_once(traces, found.seen, whole, axis_groups(case), TOLERANCES[dtype])
    if one is None:
        return ""
    return (f"what it gives is a part on each rank, but for what {expression(one.line)} gives, "
            f"which each has whole: their sum over {one.axis} has that {len(one.ranks)} times, and "
            f"is right with it counted once")  # fmt: skip


@unless_it_fails
def too_much_back(case: Case, look: Look, found: FirstWrong) -> str:
    """What a wrong gradient has of what reaches another module too often, or lacks; or nothing."""
    traces, dtype = traces_looked_at(case), case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64" or found.lost or found.over_all or found.emptied:
        return ""
    factor = factor_beside(look, found)
    one = surplus_back(traces, found.seen, factor, TOLERANCES[dtype])
    if one is None or found.wrong in one.name.split(" "):
        return ""
    way = f"what reaches {kept_in_words(one.name)}, as a way beside it (a residual) brings it"
    if abs(one.times + 1) < ONCE:
        return f"it lacks {way}"
    return f"it has {_so_often(abs(one.times))} {'more' if one.times > 0 else 'less'} {way}"


def _so_often(times: float) -> str:
    return "once" if abs(times - 1) < ONCE else f"{fraction_of(times)} times"


def _by_each_rank(case: Case, found: FirstWrong, one: Surplus) -> list[str]:
    """Where it is in once for each rank of an axis but one, and something is summed there."""
    rank = found.ranks[0]
    sums = [w for w in issued_between(case, found, back=False) or () if w.startswith(SUMS)]
    for axis, groups in axis_groups(case):
        group = next((g for g in groups if rank in g), ())
        over = f" over ranks {spans(list(group))}"
        if abs(one.times + 1 - len(group)) < ONCE and any(over in words for words in sums):
            return [f"it is there once for each other rank of {axis} ({len(group)} in all), and "
                    f"in between rank {rank} issues a sum over them: as where something whole is "
                    f"added on each before that sum"]  # fmt: skip
    return []


def _lines_with(case: Case, found: FirstWrong, one: Surplus) -> list[str]:
    """The line of a wrong rank that takes it, where it is a parameter."""
    traces = case.traces
    value = None if traces is None else traces.single.params.get(one.name)
    if traces is None or value is None:
        return []
    own = traces.ranks[found.ranks[0]].computed
    for c in own.computations:
        given = (own.values[n] for n in c.takes if isinstance(n, int))
        if c.line and found.wrong in c.inside and any(torch.equal(v, value) for v in given):
            return [f"look at {line_and_code(c.line, c.code)}, which takes it"]
    return []
