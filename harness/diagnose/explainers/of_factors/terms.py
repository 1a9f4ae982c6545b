"""Terms of a loss that count otherwise in every parameter, as penalties of a rank's own part do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case, fails
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.names import factor_symbols
from sumgrad.judge.cells import Cell

NEEDED = 4  # elements for each factor
SAME = 1e-6
SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How often each term is in a rank's gradient of one parameter; only of terms that reach it."""

    cell: Cell
    often: dict[str, float]


def terms_by_parameter(case: Case, left: Left) -> Iterator[Explanation]:
    """One term has a factor of its own in each parameter and on each rank; the others are right."""
    if case.has_plan or not case.exact:
        return
    found = [_counted(cell) for cell in case.failing_cells]
    told = [one for one in found if one is not None]
    others = {c.name: None for c, o in zip(case.failing_cells, found, strict=True) if o is None}
    odd = {t for one in told for t, value in one.often.items() if abs(value - 1) > SAME}
    small = min((one.cell.measured.numel() for one in told), default=0)
    large = any(c.measured.numel() >= small and c.name in others for c in case.failing_cells)
    if len(told) < 2 or large or len(odd) != 1:
        return
    term = odd.pop()
    right = sorted({t for one in told for t in one.often} - {term})
    factors = [one.often.get(term, 1.0) for one in told]
    if not right:
        return
    if max(factors) - min(factors) <= SAME * max(1.0, *map(abs, factors)):
        yield explained(case, _in_some(case, told, term, factors[0], right, list(others)))
        return
    groups: dict[str, list[str]] = {}
    for one, factor in zip(told, factors, strict=True):
        groups.setdefault(_number(factor), []).append(f"{one.cell.name} on rank {one.cell.rank}")
    shown = [f"{number} times in {some_of(places)}" for number, places in groups.items()]
    more = f", and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    names = list(dict.fromkeys(one.cell.name for one in told))
    yield explained(
        case,
        Diagnosis(
            cause=f"{term} counts otherwise in each parameter and on each rank: "
            f"{', '.join(shown[:SHOWN])}{more}; {some_of(right)} is right",
            kind="term_by_parameter",
            standing="likely" if others else "proved",
            term=term,
            ranks=tuple(sorted({one.cell.rank for one in told})),
            because=(
                f"with one factor for {term} in each parameter of each rank the gradient of "
                f"{some_of(names)} is what was measured, within the threshold",
                f"look at how {term} reaches the parameters: what it is made of (a norm, a count) "
                f"may be that of the rank's own part",
            ),
            however=(f"{some_of(list(others))} is wrong too, and too small to tell",)
            if others
            else (),
        ),
    )


def _in_some(
    case: Case, told: list[Counted], term: str, factor: float, right: list[str], others: list[str]
) -> Diagnosis:
    """One factor in some parameters, where it is right in the rest."""
    names = list(dict.fromkeys(one.cell.name for one in told))
    wrong = {cell.name for cell in case.failing_cells}
    once = list(dict.fromkeys(
        c.name for c in case.cells
        if c.name not in wrong and term in c.wanted.terms and bool(c.wanted.terms[term].any())
    ))  # fmt: skip
    symbols = factor_symbols(case, factor)
    times = f"{_number(factor)}{f' = {symbols[0]}' if symbols else ''} times"
    how = "does not reach" if abs(factor) <= SAME else f"counts {times} in"
    return Diagnosis(
        cause=f"{term} {how} {some_of(names)}; {some_of(right)} is right",
        kind="term_by_parameter",
        standing="likely" if others else "proved",
        term=term,
        ranks=tuple(sorted({one.cell.rank for one in told})),
        because=(
            f"with {_number(factor)} times {term} its gradient is what was measured, within the "
            f"threshold",
            *([f"{term} counts once in {some_of(once)}"] if once else []),
        ),
        however=(f"{some_of(others)} is wrong too, and too small to tell",) if others else (),
    )


def _counted(cell: Cell) -> Counted | None:
    """By least squares over the elements of one gradient; None where they do not tell."""
    live = {t: v.reshape(-1).double() for t, v in cell.wanted.terms.items() if bool(v.any())}
    if len(live) < 2 or cell.measured.numel() < NEEDED * len(live):
        return None
    if not bool(torch.isfinite(cell.measured).all()):
        return None
    columns = torch.stack(list(live.values()), dim=1)
    lengths = columns.norm(dim=0)
    if int(torch.linalg.matrix_rank(columns / lengths, rtol=1e-9)) < len(live):
        return None
    measured = cell.measured.reshape(-1, 1)
    solved = torch.linalg.lstsq(columns / lengths, measured, driver="gelsd").solution
    often = solved[:, 0] / lengths
    left = (measured - (columns / lengths) @ solved)[:, 0].reshape(cell.measured.shape)
    if fails(cell, left, factor=2 * max(1.0, float(often.abs().max()))):
        return None
    values = {term: float(value) for term, value in zip(live, often, strict=True)}
    return Counted(cell=cell, often=values)


def _number(value: float) -> str:
    fraction = as_fraction(0.0 if abs(value) <= SAME else value, 1e-9)
    return str(fraction) if fraction is not None else f"{value:.6g}"
