"""Gradients that are not finite on a rank, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.diagnose.modules.how_wrong.not_finite import not_finite

MOST_RANKS = 3


def with_what_is_not_finite(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Any cause, and where gradients are no numbers that nothing later shows any more."""
    said = _in_words(case)
    return replace(diagnosis, because=(*said, *diagnosis.because)) if said else diagnosis


@as_a_hint
def _in_words(case: Case) -> list[str]:
    traces = case.traces
    found = [*not_finite(traces)] if traces is not None else []
    told = [one for one in found if one.calls]
    if not told:
        return []
    shown = []
    for one in told[:MOST_RANKS]:
        modules = list(dict.fromkeys(m or "the model" for m, _ in one.calls))
        calls = spans(sorted({number for _, number in one.calls}))
        shown.append(f"{some_of(modules)} on rank {one.rank} in call {calls}")
    text = f"not all numbers are finite in the gradient that reaches {'; '.join(shown)}"
    text += f"; and on {len(told) - MOST_RANKS} more ranks" if len(told) > MOST_RANKS else ""
    lines = [one.line for one in told if one.line is not None]
    at = dict.fromkeys(expression(line) for line in lines)
    made = f"; what reaches the result of {some_of([*at])} is finite still" if at else ""
    return [f"{text}{made}; in the single process all are"]
