"""Coefficients of a failed step of a Program: which multiples of which partials it is made of.

The reference's partials are known by term and row interval. A level says which of them share one
factor; the levels are tried from the fewest factors to the most, and one is accepted only if its
whole residual is under the tier's threshold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from sumgrad.diagnose.case import MIN_EXPLAINED, Case, fails
from sumgrad.diagnose.fit import Fit, fit_deviation
from sumgrad.diagnose.reductions import CLOSE
from sumgrad.judge.cells import Cell
from sumgrad.record.reference import ALL, Reference
from torch import Tensor

Level = Literal["everything", "params", "terms", "rows", "cells", "previous"]
LITTLE = (1 - MIN_EXPLAINED) ** 0.5
MAX_UNITS = 64
MIN_TELLING = 3  # elements below which a stretch of rows fits by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Partials that share one factor. rows: None for all; previous: of the step before."""

    term: str | None
    rows: tuple[int, int] | None
    previous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """values[i] is how often unit i is counted; None where the data cannot tell. param: where the
    level has one factor for each parameter."""

    level: Level
    units: tuple[Unit, ...]
    values: tuple[float | None, ...]
    sigmas: tuple[float | None, ...]
    params: tuple[str, ...] = ()

    @property
    def known(self) -> list[float]:
        return [v for v in self.values if v is not None]

    def counted(self, number: float) -> list[Unit]:
        """The units that are counted this often."""
        return [
            unit
            for unit, value in zip(self.units, self.values, strict=True)
            if value is not None and abs(value - number) < CLOSE
        ]


def explain(case: Case, cells: Sequence[Cell], *, wrong_only: bool = False) -> Factors | None:
    """The first level that explains these cells together.

    wrong_only: look only at the elements that are over the threshold.
    """
    chosen = [cell for cell in cells if cell.measured.numel()]
    if not chosen or any(not bool(torch.isfinite(cell.measured).all()) for cell in chosen):
        return None
    masks = [_mask(cell, wrong_only) for cell in chosen]
    for level, units in _levels(case):
        found = _try(case, chosen, masks, level, units)
        if found is not None:
            return found
    return None if wrong_only else _by_param(case, chosen)


def explain_rank(case: Case, cells: Sequence[Cell], *, wrong_only: bool = False) -> Factors | None:
    """The same for one rank, which may also hold just one stretch of the rows.

    A small shard has fewer elements than there are rows: then the stretches are tried one by one.
    """
    return explain(case, cells, wrong_only=wrong_only) or _one_stretch(case, cells, wrong_only)


def _one_stretch(case: Case, cells: Sequence[Cell], wrong_only: bool) -> Factors | None:
    """Rows [a, b) once and no others, for the first such stretch whose residual is small."""
    intervals = case.reference.intervals
    chosen = [cell for cell in cells if cell.measured.numel()]
    if not chosen or not 0 < len(intervals) <= MAX_UNITS:
        return None
    masks = [_mask(cell, wrong_only) for cell in chosen]
    units = [Unit(term=None, rows=rows) for rows in intervals]
    columns = torch.stack(
        [
            torch.cat(
                [column(case, c, u).reshape(-1)[m] for c, m in zip(chosen, masks, strict=True)]
            )
            for u in units
        ]
    )
    got = torch.cat([c.measured.reshape(-1)[m] for c, m in zip(chosen, masks, strict=True)])
    bound = torch.cat(
        [
            torch.full((int(m.sum()),), 2 * c.wanted.threshold)
            for c, m in zip(chosen, masks, strict=True)
        ]
    )
    if len(got) < MIN_TELLING:
        return None
    wanted = columns.sum(0)
    for a in range(len(units)):
        total = torch.zeros_like(got)
        for b in range(a, len(units)):
            total = total + columns[b]
            near = bool(((got - total).abs() <= bound).all())
            if near and bool((got - total).norm() <= LITTLE * (got - wanted).norm()):
                values = tuple(1.0 if a <= i <= b else 0.0 for i in range(len(units)))
                return Factors(
                    level="rows", units=tuple(units), values=values, sigmas=(0.0,) * len(units)
                )
    return None


def _levels(case: Case) -> Iterator[tuple[Level, list[Unit]]]:
    terms = [t for t, kind in case.reference.kinds.items() if kind != "coupled"]
    yield "everything", [Unit(term=None, rows=None)]
    if not terms:
        return
    if len(terms) > 1:
        yield "terms", [Unit(term=t, rows=None) for t in terms]
    intervals = case.reference.intervals
    if not intervals:
        return  # the gradient was not taken apart
    if len(intervals) <= MAX_UNITS:
        yield "rows", [Unit(term=None, rows=rows) for rows in intervals]
        if case.previous is not None:
            yield (
                "previous",
                [Unit(term=None, rows=None)]
                + [Unit(term=None, rows=rows, previous=True) for rows in intervals],
            )
    if len(terms) > 1 and len(terms) * len(intervals) <= MAX_UNITS:
        units = []
        for t in terms:
            once = case.reference.kinds[t] == "once"
            units += [Unit(term=t, rows=rows) for rows in ([None] if once else intervals)]
        yield "cells", units


def _try(
    case: Case, cells: Sequence[Cell], masks: Sequence[Tensor], level: Level,
    units: Sequence[Unit],
) -> Factors | None:  # fmt: skip
    deviation = torch.cat(
        [_scaled(c, c.measured - c.wanted.value)[m] for c, m in zip(cells, masks, strict=True)]
    )
    columns = [
        torch.cat([_scaled(c, column(case, c, u))[m] for c, m in zip(cells, masks, strict=True)])
        for u in units
    ]
    if len(deviation) <= len([c for c in columns if bool(c.any())]):
        return None
    fit = fit_deviation(columns, deviation)
    values = list(fit.values)
    if level == "previous":
        values = [v if not u.previous or v is None else v - 1
                  for u, v in zip(units, values, strict=True)]  # fmt: skip
    if not _accepted(cells, masks, fit):
        return None
    return Factors(level=level, units=tuple(units), values=tuple(values), sigmas=tuple(fit.sigmas))


def _accepted(cells: Sequence[Cell], masks: Sequence[Tensor], fit: Fit) -> bool:
    factor = max([1.0, *(abs(v) for v in fit.values if v is not None)])
    start = 0
    for cell, mask in zip(cells, masks, strict=True):
        part = fit.residual[start : start + int(mask.sum())]
        start += int(mask.sum())
        if fails(cell, part * _size(cell), factor=2 * factor):
            return False
    return fit.explained >= MIN_EXPLAINED


def _by_param(case: Case, cells: Sequence[Cell]) -> Factors | None:
    """One factor for each parameter: what reductions nested in depth leave."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    values, sigmas = [], []
    for name in names:
        mine = [cell for cell in cells if cell.name == name]
        masks = [_mask(cell, False) for cell in mine]
        found = _try(case, mine, masks, "everything", [Unit(term=None, rows=None)])
        if found is None:
            return None
        values.append(found.values[0])
        sigmas.append(found.sigmas[0])
    return Factors(
        level="params",
        units=tuple(Unit(term=None, rows=None) for _ in names),
        values=tuple(values),
        sigmas=tuple(sigmas),
        params=tuple(names),
    )


def column(case: Case, cell: Cell, unit: Unit) -> Tensor:
    """A unit's partial as this cell holds it, float64."""
    reference = case.previous if unit.previous else case.reference
    assert reference is not None
    if unit.term is None and unit.rows is None:
        full = reference.grads[cell.name]
    else:
        full = torch.zeros_like(reference.grads[cell.name])
        for term in [unit.term] if unit.term else reference.kinds:
            full = full + _partial(reference, term, cell.name, unit.rows)
    return full if cell.index is None else full.reshape(-1)[cell.index]


def _partial(reference: Reference, term: str, name: str, rows: tuple[int, int] | None) -> Tensor:
    if reference.kinds[term] == "coupled":
        return torch.zeros_like(reference.grads[name])
    if rows is None or reference.kinds[term] == "once":
        # a term without rows counts with the first interval
        first = rows is None or rows == reference.intervals[0]
        whole = reference.by_term[term][name]
        return whole if first else torch.zeros_like(whole)
    held = reference.partials[term, ALL][name]
    return held[reference.intervals.index(rows)]


def _mask(cell: Cell, wrong_only: bool) -> Tensor:
    error = (cell.measured - cell.wanted.value).abs().reshape(-1)
    return error > cell.wanted.threshold if wrong_only else torch.ones_like(error, dtype=torch.bool)


def _scaled(cell: Cell, value: Tensor) -> Tensor:
    return value.reshape(-1) / _size(cell)


def _size(cell: Cell) -> float:
    return cell.wanted.size or cell.wanted.scale or 1.0
