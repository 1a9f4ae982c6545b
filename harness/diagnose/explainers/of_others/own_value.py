"""A gradient with the parameter itself in it: a decay, or a buffer that held parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case, explains, fails
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction
from sumgrad.judge.cells import Cell
from torch import Tensor

SAME = 1e-6
FEWEST = 4  # elements that one multiple has to fit


def own_value_added(case: Case, left: Left) -> Iterator[Explanation]:
    """Every wrong gradient is the right one and one multiple of its parameter, added."""
    traces = case.traces
    held = {} if traces is None else traces.single.params
    cells = [cell for cell in case.failing_cells if cell.measured.numel()]
    if case.has_plan or not cells or any(cell.name not in held for cell in cells):
        return
    if sum(cell.measured.numel() for cell in _once(cells)) < FEWEST:
        return  # a multiple of one number is any number
    values = [(cell, _as_held(cell, held[cell.name])) for cell in cells]
    squares = sum(float(own.square().sum()) for _, own in values)
    if not squares:
        return
    off = sum(float(((c.measured - c.wanted.value) * own).sum()) for c, own in values)
    times = off / squares
    rest = [(c, c.measured - c.wanted.value - times * own) for c, own in values]
    large = [_times_larger(c, times * own) for c, own in values]
    wrong = any(fails(c, e, factor=2 * n) for (c, e), n in zip(rest, large, strict=True))
    if wrong or not explains(rest):
        return
    names = list(dict.fromkeys(cell.name for cell in cells))
    ranks = tuple(sorted({cell.rank for cell in cells}))
    fraction = as_fraction(times, SAME * abs(times))
    shown = str(fraction) if fraction is not None else f"{times:.9g}"
    yield explained(
        case,
        Diagnosis(
            cause=f"{some_of(names)} has {shown} times the parameter itself added to its gradient: "
            f"a decay that is part of the gradient, or a buffer that held parameters and was not "
            f"zeroed",
            kind="own_value",
            standing="proved",
            ranks=ranks,
            factor=shown,
            because=(
                f"with {shown} times the parameter taken off every wrong gradient is right, within "
                f"the threshold, on rank {spans(ranks)}",
            ),
        ),
    )


def _once(cells: Sequence[Cell]) -> list[Cell]:
    """One cell of each parameter: what replicas hold is the same evidence."""
    return list({cell.name: cell for cell in cells}.values())


def _times_larger(cell: Cell, added: Tensor) -> float:
    """How much larger than the gradient is what is added to it: so are its roundings."""
    return 1 + float(added.abs().max()) / (cell.wanted.size or cell.wanted.scale or 1.0)


def _as_held(cell: Cell, full: Tensor) -> Tensor:
    """A parameter as a rank holds it, float64."""
    return full.double() if cell.index is None else full.double().reshape(-1)[cell.index]
