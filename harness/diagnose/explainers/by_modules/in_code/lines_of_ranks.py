"""Lines that ranks run where a module is right, and others do not where it is wrong, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sumgrad.base.files import is_librarys
from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace

MOST_LINES = 3  # more are another way to compute it


@as_a_hint
def lines_of_right_ranks(case: Case, right: Sequence[int], wrong: Sequence[int]) -> list[str]:
    """Of the user's own, in the forward: what all of the right ranks run and none of the wrong,
    and the other way round."""
    traces = case.traces
    if traces is None or not right or not wrong:
        return []
    ran = {rank: _lines(traces.ranks[rank]) for rank in (*right, *wrong)}
    single = _lines(traces.single)
    return [
        text
        for these, others, there in ((right, wrong, True), (wrong, right, False))
        if (text := _only(ran, these, others, single, there=there))
    ]


def _only(
    ran: Mapping[int, Mapping[Line, None]],
    these: Sequence[int],
    others: Sequence[int],
    single: Mapping[Line, None],
    *,
    there: bool,
) -> str:
    """there: those alone that the single process runs, too; else those that it does not."""
    lines = [
        line
        for line in ran[these[0]]
        if all(line in ran[r] for r in these)
        and not any(line in ran[r] for r in others)
        and (line in single) == there
    ]
    if not 0 < len(lines) <= MOST_LINES:
        return ""
    shown = some_of([line_and_code(*line) for line in lines])
    of = "rank" if len(these) == 1 else "all of rank"
    text = f"{of} {spans(sorted(these))} and not rank {spans(sorted(others))} run"
    return f"{text}{'s' * (len(these) == 1)} {shown}"


def _lines(trace: Trace) -> dict[Line, None]:
    """Not those of two branches, which run everywhere and call something here or there."""
    return dict.fromkeys(
        (c.line, c.code)
        for c in trace.computed.computations
        if c.line and not is_librarys(c.line) and not (" if " in c.code and " else " in c.code)
    )
