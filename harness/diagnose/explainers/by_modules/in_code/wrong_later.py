"""A line that is right when it runs first and wrong when it runs again, in words; where nothing is
known, the first that gives what the single process has nowhere."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.computed import lines_that_differ
from sumgrad.diagnose.explainers.by_modules.in_code.lines import (
    agreed,
    expression,
    in_words,
    known_lines,
)
from sumgrad.diagnose.explainers.by_modules.leading import led_by
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, looked, ordinal
from sumgrad.diagnose.modules.in_code.wrong_later import wrong_later
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_forward

KINDS = ("open", "backward")  # where no module's forward is known to be wrong


def with_the_turn(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where, behind the line that goes wrong when it runs again; not where the
    forward is known to go wrong in a module, or a line is known to compute with something else."""
    look = looked(case)
    if look is None or diagnosis.kind not in KINDS or first_wrong_forward(look) is not None:
        return diagnosis
    if lines_that_differ(case):
        return diagnosis
    said = _in_words(case)
    if said:
        return led_by(diagnosis, said[0])
    lines = _new_lines(case) if diagnosis.kind == "open" else []
    return replace(diagnosis, because=(*lines, *diagnosis.because))


@as_a_hint
def _new_lines(case: Case) -> list[str]:
    """Where nothing else is known, the first line outside of right modules that gives what the
    single process has nowhere."""
    lines, traces, look = known_lines(case), case.traces, looked(case)
    if lines is None or traces is None or look is None:
        return []
    right = {m for m in look.modules if look.forward(m) == "right"}
    asked = dict.fromkeys(traces.ranks, lambda c: right.isdisjoint(c.inside))
    return [*in_words(agreed(lines.first_forward, asked, [*asked]))]


@as_a_hint
def _in_words(case: Case) -> list[str]:
    """Of the ranks the first, where it is the same line's."""
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return []
    found = (next(wrong_later(lines, rank), None) for rank in traces.ranks)
    firsts = [one for one in found if one is not None]
    sites = [one.mine.site for one in firsts]
    told = [one for one in firsts if one.mine.site == max(sites, key=sites.count)]
    turns = {(one.since, one.times) for one in told}
    if not told or len(turns) > 1:
        return []
    one = told[0]
    right = "the first time" if one.since == 1 else f"the first {one.since} times"
    on = spans([o.rank for o in told])
    return [f"{expression(one.mine)} runs {one.times} times on rank {on}: {right} it gives what "
            f"the single process has, and from the {ordinal(one.since)} on what that has nowhere: "
            f"look at what it takes then that should be another than before"]  # fmt: skip
