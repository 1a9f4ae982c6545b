"""A module on the way that gives its rows in another order than it gets them, in words."""

from __future__ import annotations

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, named
from sumgrad.diagnose.modules.inputs.reordered import Reordered, reordered
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look

MOST_ROWS = 8  # of a call, that are written out


@as_a_hint
def reordered_in_words(case: Case, look: Look, found: FirstWrong) -> list[str]:
    """Of the modules that what is wrong is made from, the first one that does so."""
    traces = case.traces
    if traces is None:
        return []
    way = {*found.beside} | look.paths.all_below(found.wrong)
    for module in (m for m in look.modules if m in way and look.forward(m) == "right"):
        if calls := reordered(traces, module):
            ranks = sorted({one.rank for one in calls})
            more = len(calls) - 1
            also = f", and so in {more} more call{'s'[: more > 1]} of all ranks" if more else ""
            return [f"{named(look, module)} gives its rows in another order than it gets them on "
                    f"rank {spans(ranks)}: {_one(calls[0])}{also}"]  # fmt: skip
    return []


def _one(call: Reordered) -> str:
    gets, gives = (", ".join(map(str, some[:MOST_ROWS])) for some in (call.gets, call.gives))
    more = ", ..." if len(call.gets) > MOST_ROWS else ""
    return (f"on rank {call.rank} in call {call.call} it gets the single process's rows "
            f"{gets}{more} and gives what that makes of rows {gives}{more}")  # fmt: skip
