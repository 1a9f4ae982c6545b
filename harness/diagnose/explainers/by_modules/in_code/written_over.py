"""What a line takes of memory that another line has written into before, on ranks alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code, ordinal
from sumgrad.record.computed import Computation
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace, Traces

KINDS = ("forward", "backward", "recomputed", "open", "loss_weights", "row_factors")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenOver:
    """What a computation, the first of a rank's, takes as argument `at`, into whose memory the line
    `by` wrote before it was made."""

    rank: int
    first: Computation
    at: int
    by: Line


def with_what_was_written_over(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where, and the first line that takes what was written over."""
    if diagnosis.kind not in KINDS:
        return diagnosis
    return replace(diagnosis, because=(*_in_words(case), *diagnosis.because))


@as_a_hint
def _in_words(case: Case) -> list[str]:
    traces = case.traces
    found = [] if traces is None else list(written_over(traces))
    if not found:
        return []
    one = found[0]
    ranks = sorted(o.rank for o in found if (o.first.line, o.at, o.by) == _key(one))
    made = line_and_code(*one.first.made_at[one.at])
    return [
        f"what {line_and_code(one.first.line, one.first.code)} takes as its {ordinal(one.at)} "
        f"argument is made at {made} of memory that {line_and_code(*one.by)} had written into "
        f"before, on rank {spans(ranks)}; in the single process it is never made of such memory"
    ]


def _key(one: WrittenOver) -> tuple[str, int, Line]:
    return one.first.line, one.at, one.by


def written_over(traces: Traces) -> Iterator[WrittenOver]:
    """Of each rank the first, of lines that the single process runs, too, and to which that never
    happens there; it runs the one that writes, too."""
    fresh = _never_written_over(traces.single)
    run = {c.line for c in traces.single.computed.computations}
    for rank, trace in traces.ranks.items():
        found = (
            WrittenOver(rank=rank, first=c, at=at, by=by)
            for c in trace.computed.computations
            for at, by in enumerate(c.written_at)
            if c.line and by[0] and by[0] in run and c.made_at[at][0]
            and (c.line, c.function, at) in fresh
        )  # fmt: skip
        yield from islice(found, 1)


def _never_written_over(single: Trace) -> set[tuple[str, str, int]]:
    """Line, function and argument."""
    out: dict[tuple[str, str, int], bool] = {}
    for c in single.computed.computations:
        for at, by in enumerate(c.written_at):
            key = c.line, c.function, at
            out[key] = out.get(key, True) and not by[0]
    return {key for key, never in out.items() if never}
