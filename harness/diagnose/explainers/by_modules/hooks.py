"""The lines of a user's hooks that a backward runs, in words."""

from __future__ import annotations

from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.passed import lines_of
from sumgrad.record.ways import Passed


def lines_of_hooks(case: Case) -> list[str]:
    """Of all ranks; of many the first and the last ones."""
    traces = case.traces
    ranks = {} if traces is None else traces.ranks
    run = [c for trace in ranks.values() for _, c in trace.computed.hooks]
    lines = lines_of([Passed(function=c.function, line=c.line, code=c.code) for c in run])
    return [f"what hooks of the step compute while the backward runs: {lines}"] if lines else []
