"""A user's Function that gives something else than the derivative of its forward, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    line_from_here,
    ordinal,
)
from sumgrad.diagnose.modules.derivatives import NEAR, OwnFormula, no_derivatives, own_formulas
from sumgrad.record.derivative import Derivative, Off
from sumgrad.record.ways import Passed

OTHERS = ("forward", "recomputed", "rows_read", "loss_rows")  # causes that no formula explains
SAID = "not the derivative of its forward"


def not_the_derivative(
    case: Case, passed: Sequence[Passed], ratio: float | None
) -> list[OwnFormula]:
    """Of Functions on the way those that explain what is wrong there. ratio: it is off by that
    factor alone; one that only scales explains nothing else, and may be meant."""
    traces = case.traces
    if traces is None:
        return []
    wrong = no_derivatives(traces)
    keys = dict.fromkeys((p.function, p.written) for p in passed if p.own)
    found = [wrong[key] for key in keys if key in wrong]
    return [one for one in found if _explains(one.scale, ratio)]


def are_the_derivative(case: Case) -> set[tuple[str, str]]:
    """Functions of which all that was told on the ranks is right."""
    traces = case.traces
    ranks = own_formulas(traces.ranks) if traces is not None else {}
    return {key for key, one in ranks.items() if not one.wrong}


def _explains(scale: float | None, ratio: float | None) -> bool:
    if scale is None or ratio is None:
        return scale is None and ratio is None
    return abs(scale - ratio) <= 10 * NEAR * abs(ratio)


def functions_in_words(found: Sequence[OwnFormula]) -> str:
    return some_of([f"{one.function} (backward at {line_from_here(one.written)})" for one in found])


def how_they_are_off(found: Sequence[OwnFormula]) -> Iterator[str]:
    """What each gives beside finite differences of its forward."""
    for one in found:
        right = {d.argument for _, d in one.told} - {d.argument for _, d in one.wrong}
        rank, d = next((w for w in one.wrong if w[1].off), one.wrong[0])
        lines = list(dict.fromkeys(line_and_code(*w.line) for _, w in one.wrong))
        names = list(dict.fromkeys(w.argument for _, w in one.wrong))
        text = (f"what the backward of {one.function} gives for {some_of(names)} is {SAID}, by "
                f"finite differences")  # fmt: skip
        text += f"; for {some_of(sorted(right))} it is" if right else ""
        yield f"{text}; it is called at {some_of(lines)}"
        yield from _off(rank, d)


def _off(rank: int, d: Derivative) -> Iterator[str]:
    if d.off is None:
        return
    where = f"in call {d.call} of {line_from_here(d.line[0])} on rank {rank}"
    what = f"for one, {where} what it gives for {d.argument}"
    if d.off.moved:
        yield f"{what} has the numbers of the derivative in other places"
        return
    if d.off.factors:
        yield f"{what} is {_times(d.off)}"
        return
    at = " and ".join(f"{spans(list(places))} of dimension {dim}" for dim, places in d.off.where)
    at = f", all at {at}" if at else ""
    zero = ", which are zero" if d.off.zero else ""
    yield f"{what} differs from it in {d.off.differ} of {d.off.numel} numbers{at}{zero}"


def _times(off: Off) -> str:
    if len(off.factors) == 1:
        return f"{_short(off.factors[0])} times the derivative"
    shares = [f"{_short(f)} times its {ordinal(i)} result's" for i, f in enumerate(off.factors)]
    return f"{', '.join(shares)} share of the derivative"


def _short(factor: float) -> str:
    """Finite differences give few digits."""
    return fraction_of(round(factor, 6) + 0.0)


def with_formulas(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Beside a cause that is not proved, a Function whose formula is not right; none that only
    scales."""
    traces = case.traces
    if traces is None or diagnosis.kind in OTHERS or diagnosis.standing == "proved":
        return diagnosis
    if any(SAID in line for line in (diagnosis.cause, *diagnosis.because)):
        return diagnosis
    found = [one for one in no_derivatives(traces).values() if one.scale is None]
    return replace(diagnosis, because=(*diagnosis.because, *how_they_are_off(found)))
