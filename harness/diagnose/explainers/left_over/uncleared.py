"""A leaf whose gradient is read after each backward and never taken away, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code
from sumgrad.diagnose.explainers.left_over.kept_otherwise import KINDS
from sumgrad.record.computed import Uncleared


def with_what_was_not_cleared(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause in the backward, and the leaf that kept what an earlier backward gave it."""
    traces = case.traces
    if diagnosis.kind not in KINDS or traces is None:
        return diagnosis
    ranks: dict[Uncleared, list[int]] = {}
    for rank, trace in traces.ranks.items():
        for one in trace.computed.uncleared:
            ranks.setdefault(one, []).append(rank)
    if not ranks:
        return diagnosis
    one, held = next(iter(ranks.items()))
    what = f"the leaf made at {line_and_code(*one.made)}" if one.made[0] else "a leaf"
    line = (
        f"the gradient of {what} that {line_and_code(*one.read)} reads was there still when the "
        f"next backward added to it, on rank {spans(held)}: read after that it has that of both, "
        f"and read before that it lacks the later one"
    )
    return replace(diagnosis, because=(line, *diagnosis.because))
