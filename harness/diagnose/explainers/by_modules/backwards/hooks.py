"""The lines of a user's hooks that a backward runs, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.passed import lines_of
from sumgrad.record.ways import Passed

SAID = "what hooks of the step compute while the backward runs: "
BEFORE = ("forward", "recomputed", "rows_read", "run_to_run")  # it was wrong already


def with_hooks(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause of what comes after the forward, and the hooks that ran there."""
    if diagnosis.kind in BEFORE or any(text.startswith(SAID) for text in diagnosis.because):
        return diagnosis
    return replace(diagnosis, because=(*diagnosis.because, *lines_of_hooks(case)))


def lines_of_hooks(case: Case) -> list[str]:
    """Of all ranks; of many the first and the last ones."""
    traces = case.traces
    ranks = {} if traces is None else traces.ranks
    run = [c for trace in ranks.values() for _, c in trace.computed.hooks]
    lines = lines_of([Passed(function=c.function, line=c.line, code=c.code) for c in run])
    return [f"{SAID}{lines}"] if lines else []
