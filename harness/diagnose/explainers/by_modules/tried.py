"""What was changed in the failing step, and made every gradient of every rank right, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.leading import PLACES
from sumgrad.diagnose.explainers.by_modules.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, fraction_of, ordinal
from sumgrad.record.computed import MODULE, Computation
from sumgrad.record.trial import Change

# Those that tell most first: a sum in the forward is no mere factor.
WAYS = ("sum", "sum_both", "largest", "smallest", "once", "attach", "sum_back", "detach",
        "skip", "number")  # fmt: skip
MOST_OTHERS = 2


def with_what_was_tried(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where, behind what makes the step right there."""
    said = _said(case) if diagnosis.kind in PLACES and diagnosis.standing != "proved" else []
    if not said:
        return diagnosis
    because = (*said[1:], diagnosis.cause.removeprefix("open: "), *diagnosis.because)
    return replace(diagnosis, cause=said[0], because=because, standing="proved")


@as_a_hint
def _said(case: Case) -> list[str]:
    trials, traces = case.record.trials, case.traces
    if traces is None:
        return []
    known = {one.change: at for one in trials if one.right and (at := _at(case, one.change))}
    if not known:
        return []
    # Of equals the last: what is linear may stand before a sum, or after it.
    first, *others = sorted(known, key=lambda one: (WAYS.index(one.way), -known[one][0]))
    line = _place(known[first][1])
    more = [o for o in others if _place(known[o][1]) != line]
    return [
        f"{_in_words(first, known[first][1])}, every gradient of every rank would be right: the "
        f"step was run so",
        *(f"{_in_words(one, known[one][1])}, they would be, too" for one in more[:MOST_OTHERS]),
        f"of {len(trials)} such changes that were tried {sum(one.right for one in trials)} made "
        f"it right",
    ]


def _at(case: Case, change: Change) -> tuple[int, Computation] | None:
    """Where a rank's step has it last."""
    assert case.traces is not None
    for trace in case.traces.ranks.values():
        for place, c in reversed([*enumerate(trace.computed.computations)]):
            if (c.site, c.function) == (change.site, change.function):
                return place, c
    return None


def _in_words(change: Change, c: Computation) -> str:
    what = "what it gives" if change.at < 0 else f"its {ordinal(change.at)} argument"
    of = f"the gradient of {what}"
    over = f"over the ranks of {change.axis}" if change.axis else "over all ranks"
    told = {
        "sum": f"were {what} summed {over} in the forward",
        "sum_both": f"were {what} summed {over}, and its gradient, too",
        "largest": f"were {what} the largest {over}",
        "smallest": f"were {what} the smallest {over}",
        "once": f"were {what}, which all ranks add, a part of it on each, so that a sum {over} "
        f"counts it once",
        "attach": "were it not detached",
        "sum_back": f"were {of} summed {over}",
        "detach": f"were {what} detached",
        "skip": "were it left out, and what it takes first handed on",
        "number": f"were {what} {fraction_of(change.by)} times what it is",
    }
    return f"{_place(c)}: {told[change.way]}"


def _place(c: Computation) -> str:
    return c.function.removeprefix(MODULE) if c.function.startswith(MODULE) else expression(c)
