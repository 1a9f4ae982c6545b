"""What the first wrong line is made of and an earlier call of the model left, in words."""

from __future__ import annotations

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import told_of
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code
from sumgrad.diagnose.modules.in_code.kept_since import kept_since
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.record.computed import MODULE
from sumgrad.record.trace import Trace


@as_a_hint
def kept_in_words(case: Case, rank: int, place: int) -> list[str]:
    """place: of the computation among the rank's."""
    traces = case.traces
    one = None if traces is None else kept_since(traces.ranks[rank], traces.single, place)
    if one is None:
        return []
    takes = f"{line_and_code(*one.taken)} takes" if one.taken[0] else "what is used there is"
    made = line_and_code(*one.made) if one.made[0] else ""
    if one.taken_then:
        since = f"was taken there in call {one.then}{f', made at {made}' if made else ''}"
    else:
        since = f"{made or 'something'} made in call {one.then}"
    return [f"in call {one.call} of the model on rank {rank} {takes} the very tensor that {since}, "
            f"and the single process has another there: look at what keeps it, and whether it is "
            f"that of these rows"]  # fmt: skip


@as_a_hint
def kept_for_the_call(case: Case, module: str, seen: tuple[Seen, ...]) -> list[str]:
    """The same of what the first wrong call of a module is handed."""
    if case.traces is None or not seen:
        return []
    s = told_of(seen)
    trace = case.traces.ranks[s.rank]
    place = _place_of(trace, module, s.call.number)
    return [] if place is None else kept_in_words(case, s.rank, place)


def _place_of(trace: Trace, module: str, number: int) -> int | None:
    """Of the module's call among the computations; None where its calls are not all there."""
    every = [i for i, c in enumerate(trace.computed.computations) if c.function == MODULE + module]
    calls = {c.number for c in trace.calls if c.module == module and not c.recomputed}
    return every[number] if len(every) == len(calls) and number in calls else None
