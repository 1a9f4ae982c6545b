"""Coefficients of a failed step of a Program: which multiples of which partials it is made of.

The reference's partials are known by term and row interval. A level says which of them share one
factor; the levels are tried from the fewest factors to the most, and one is accepted only if its
whole residual is under the tier's threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
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
MAX_TERMS = 8
MAX_PAIRS = 4096  # of stretches that are tried
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
    return None if wrong_only else _whole_terms(case, chosen, masks) or by_param(case, chosen)


def explain_rank(case: Case, cells: Sequence[Cell], *, wrong_only: bool = False) -> Factors | None:
    """The same for one rank, which may also hold just one stretch of the rows.

    A small shard has fewer elements than there are rows: then the stretches are tried one by one.
    """
    return explain(case, cells, wrong_only=wrong_only) or _few_stretches(case, cells, wrong_only)


def _few_stretches(case: Case, cells: Sequence[Cell], wrong_only: bool) -> Factors | None:
    """The rows of one stretch once, or of two, and no others: what ranks that share a reduction
    hold. None where several pairs of stretches fit."""
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
    off = float((got - columns.sum(0)).norm())

    def fits(chosen: Tensor) -> bool:
        error = (got - chosen.to(columns) @ columns).abs()
        return bool((error <= bound).all()) and float(error.norm()) <= LITTLE * off

    ends = torch.combinations(torch.arange(len(units) + 1))
    at = torch.arange(len(units))
    stretches = (ends[:, :1] <= at) & (at < ends[:, 1:])
    one = {tuple(s.tolist()) for s in stretches if fits(s)}
    two = {} if one else dict.fromkeys(_in_two(stretches, columns, got, bound, fits))
    # Of rows that give these parameters nothing nobody can tell.
    telling = (columns.abs() > bound).any(1).tolist()
    found = {
        tuple(float(there) if tells else None for there, tells in zip(fit, telling, strict=True))
        for fit in one or two
    }
    if len(found) != 1:
        return None
    return Factors(level="rows", units=tuple(units), values=found.pop(), sigmas=(0.0,) * len(units))


def _in_two(
    stretches: Tensor, columns: Tensor, got: Tensor, bound: Tensor, fits: Callable[[Tensor], bool]
) -> Iterator[tuple[bool, ...]]:
    """Pairs of stretches apart from each other whose rows add up to `got`: by one random sum of the
    elements each stretch looks for what is left of `got`."""
    drawn = torch.Generator().manual_seed(len(got))
    weights = torch.randn(len(got), generator=drawn, dtype=got.dtype)
    given, order = (stretches.to(columns) @ columns @ weights).sort()
    slack = float((weights.abs() * bound).sum())
    left = float(got @ weights) - given
    first = torch.searchsorted(given, left - slack)
    last = torch.searchsorted(given, left + slack)
    if int((last - first).sum()) > MAX_PAIRS:
        return
    for i, (a, b) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        for j in range(a, b):
            mine, other = stretches[order[i]], stretches[order[j]]
            if not bool((mine & other).any()) and fits(mine | other):
                yield tuple((mine | other).tolist())


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
    # Of one number alike on every rank the factor is said all the same: it may be a size.
    told = len(deviation) if len(units) == 1 else _num_equations(cells, masks)
    if told <= len([c for c in columns if bool(c.any())]):
        return None
    fit = fit_deviation(columns, deviation)
    values = list(fit.values)
    if level == "previous":
        values = [v if not u.previous or v is None else v - 1
                  for u, v in zip(units, values, strict=True)]  # fmt: skip
    if not _accepted(cells, masks, fit):
        return None
    return Factors(level=level, units=tuple(units), values=tuple(values), sigmas=tuple(fit.sigmas))


def _whole_terms(case: Case, cells: Sequence[Cell], masks: Sequence[Tensor]) -> Factors | None:
    """Terms that are there once or not at all: fewer numbers than terms can tell that."""
    terms = [t for t, kind in case.reference.kinds.items() if kind != "coupled"]
    got = torch.cat([_scaled(c, c.measured)[m] for c, m in zip(cells, masks, strict=True)])
    wanted = torch.cat([_scaled(c, c.wanted.value)[m] for c, m in zip(cells, masks, strict=True)])
    columns = {
        t: torch.cat([_scaled(c, column(case, c, Unit(term=t, rows=None)))[m]
                      for c, m in zip(cells, masks, strict=True)])
        for t in terms
    }  # fmt: skip
    reaching = [t for t in terms if bool(columns[t].any())]
    if not 1 < len(reaching) <= MAX_TERMS or _num_equations(cells, masks) < MIN_TELLING:
        return None
    fitting = []
    for chosen in product((0.0, 1.0), repeat=len(reaching)):
        lacking = [columns[t] for t, there in zip(reaching, chosen, strict=True) if not there]
        residual = got - wanted + torch.stack(lacking).sum(0) if lacking else got - wanted
        explained = 1 - float(residual.square().sum() / (got - wanted).square().sum())
        fit = Fit(values=list(chosen), sigmas=[0.0] * len(chosen), residual=residual,
                  explained=explained)  # fmt: skip
        if _accepted(cells, masks, fit):
            fitting.append(chosen)
    if len(fitting) != 1:
        return None
    there = dict(zip(reaching, fitting[0], strict=True))
    return Factors(
        level="terms",
        units=tuple(Unit(term=t, rows=None) for t in terms),
        values=tuple(there.get(t) for t in terms),
        sigmas=tuple(0.0 if t in there else None for t in terms),
    )


def _num_equations(cells: Sequence[Cell], masks: Sequence[Tensor]) -> int:
    """Elements of gradients that these cells hold: what replicas hold alike is one equation."""
    held: dict[str, list[Tensor]] = {}
    for cell, mask in zip(cells, masks, strict=True):
        index = torch.arange(len(mask)) if cell.index is None else cell.index.reshape(-1)
        held.setdefault(cell.name, []).append(index[mask])
    return sum(len(torch.cat(indices).unique()) for indices in held.values())


def _accepted(cells: Sequence[Cell], masks: Sequence[Tensor], fit: Fit) -> bool:
    factor = max([1.0, *(abs(v) for v in fit.values if v is not None)])
    start = 0
    for cell, mask in zip(cells, masks, strict=True):
        part = fit.residual[start : start + int(mask.sum())]
        start += int(mask.sum())
        if fails(cell, part * _size(cell), factor=2 * factor):
            return False
    return fit.explained >= MIN_EXPLAINED


def by_param(case: Case, cells: Sequence[Cell]) -> Factors | None:
    """One factor for each parameter: what reductions nested in depth leave."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    if all(cell.wanted.value.numel() == 1 for cell in cells):
        return None  # any factor fits one number
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
