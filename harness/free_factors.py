"""When no edge of the plan explains a failure: free factors on partials, holder by holder.

One factor, then two, then one for each term, then least squares over row intervals. What none of
them explains under the threshold is no weighting bug, and is not called one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import torch
from sumgrad.case import Case, Holder, column, covers_all, deviation, size_of, whole_terms
from sumgrad.fit import Fit, as_fraction, fit_deviation
from sumgrad.hypotheses import factor_names
from sumgrad.proof import Coefficient
from sumgrad.schedule import Mismatch
from sumgrad.verdict import Diagnosis, RecoveredCoefficient
from torch import Tensor

MAX_INTERVALS = 48
MAX_ALSO = 4


def fit_factors(
    case: Case, mismatches: Sequence[Mismatch]
) -> tuple[tuple[Diagnosis, ...], tuple[RecoveredCoefficient, ...]]:
    """One free factor, two, then least squares over row intervals, holder by holder."""
    diagnoses: list[Diagnosis] = []
    coefficients: list[RecoveredCoefficient] = []
    for holder in case.failing:
        diagnosis, found = _fit_holder(case, holder)
        diagnoses.append(diagnosis)
        coefficients += found
    evidence = tuple(f"the ledger differs from the plan: {m}" for m in mismatches[:2])
    merged = _merge_equal(diagnoses)
    return tuple(replace(d, because=d.because + evidence) for d in merged), tuple(coefficients)


def _fit_holder(case: Case, holder: Holder) -> tuple[Diagnosis, list[RecoveredCoefficient]]:
    best: tuple[float, str, Fit] | None = None
    for label, groups in _groupings(case, holder):
        columns = [_sum_columns(case, holder, group) for group in groups]
        fit = fit_deviation(columns, deviation(holder))
        if best is None or fit.explained > best[0]:
            best = (fit.explained, label, fit)
        if _residual_passes(holder, fit):
            return _free_factor(case, holder, label, groups, fit)
    share, nearest, _ = best if best else (0.0, "nothing", None)
    ranks = ", ".join(map(str, holder.ranks))
    return Diagnosis(
        cause=f"not a weighting bug: no factors on the terms' partials explain {holder.unit} on "
        f"rank {ranks}",
        kind="not_weighting",
        ranks=holder.ranks,
        because=("the residual of every fit is above the threshold",),
        however=(f"{nearest} explains {share:.4%} of the deviation",),
    ), []


def _groupings(case: Case, holder: Holder) -> Iterator[tuple[str, list[list[Coefficient]]]]:
    """Sets of cells that get one free factor each, fewest factors first."""
    terms = whole_terms(case, holder)
    yield "one factor on everything", [terms]
    named = {t.term for t in terms}
    single: list[tuple[str, list[Coefficient]]] = [
        (f"a factor on {name}", [t for t in terms if t.term == name]) for name in sorted(named)
    ]
    single += [(f"a factor on {t.term} of {t.producer}", [t]) for t in terms]
    for cells in _by_rank_rows(case, terms):
        single.append(cells)
    for label, alone in single:
        yield label, [alone]
    for (label_a, a), (label_b, b) in combinations(single[: 3 * len(terms)], 2):
        yield f"{label_a} and {label_b}", [a, b]
    yield "a factor on each term", [[t] for t in terms]
    intervals = [cell for t in terms for cell in _intervals(case, t)]
    if len(intervals) <= MAX_INTERVALS:
        yield "a factor on each term and row interval", [[cell] for cell in intervals]


def _by_rank_rows(
    case: Case, terms: Sequence[Coefficient]
) -> Iterator[tuple[str, list[Coefficient]]]:
    for pool in case.plan.topology.pools:
        for rank in pool.ranks:
            rows = case.plan.rows(rank)
            cells = [replace(t, rows=rows) for t in terms if t.rows is not None]
            if rows[0] < rows[1] and cells:
                yield f"a factor on the rows of {case.plan.topology.place(rank)}", cells
                for cell in cells:
                    label = f"{cell.term} of {cell.producer} on the rows of "
                    yield f"a factor on {label}{case.plan.topology.place(rank)}", [cell]


def _intervals(case: Case, cell: Coefficient) -> list[Coefficient]:
    """A term's rows, cut wherever its producer or the quantity's producer cuts them."""
    if cell.rows is None:
        return [cell]
    cuts = set(case.plan.offsets[cell.producer])
    if case.plan.producer_pool and case.plan.declaration.term(cell.term).reads_quantity:
        cuts |= set(case.plan.offsets[case.plan.producer_pool])
    ordered = sorted(cuts)
    return [replace(cell, rows=(a, b)) for a, b in pairwise(ordered)]


def _sum_columns(case: Case, holder: Holder, cells: Sequence[Coefficient]) -> Tensor:
    columns = [c for c in (column(case, holder, cell) for cell in cells) if c is not None]
    return torch.stack(columns).sum(0) if columns else torch.zeros_like(deviation(holder))


def _residual_passes(holder: Holder, fit: Fit) -> bool:
    factor = max([1.0, *(abs(v) for v in fit.values if v is not None)])
    start = 0
    for wanted in holder.expected.values():
        part = fit.residual[start : start + wanted.value.numel()]
        start += wanted.value.numel()
        if float(part.abs().max()) * size_of(wanted) > wanted.threshold * factor:
            return False
    return True


def _free_factor(
    case: Case,
    holder: Holder,
    label: str,
    groups: Sequence[Sequence[Coefficient]],
    fit: Fit,
) -> tuple[Diagnosis, list[RecoveredCoefficient]]:
    names = factor_names(case.plan)
    found, readings = [], []
    for group, value, sigma in zip(groups, fit.values, fit.sigmas, strict=True):
        fraction = as_fraction(value, sigma)
        symbols = names.get(fraction, []) if fraction is not None else []
        readings.append((fraction, value, symbols))
        for cell in group:
            found.append(
                RecoveredCoefficient(
                    params=holder.unit,
                    ranks=holder.ranks,
                    term=cell.term,
                    producer=cell.producer,
                    rows=None if covers_all(case, cell) else cell.rows,
                    expected="1",
                    recovered=value,
                    sigma=sigma,
                    fraction=str(fraction) if fraction is not None else None,
                    identifiable=value is not None,
                )
            )
    odd = [r for r in readings if r[1] is not None and abs(r[1] - 1) > 1e-6] or readings
    fraction, value, symbols = odd[0]
    shown = str(fraction) if fraction is not None else f"{value:.9g}" if value else "?"
    several = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    terms = {cell.term for group in groups for cell in group}
    return Diagnosis(
        cause=f"{label}: {shown}{' = ' + symbols[0] if symbols else ''}{several}, "
        f"on no single edge of the plan",
        kind="free_factor",
        term=terms.pop() if len(terms) == 1 else None,
        ranks=holder.ranks,
        factor=str(fraction) if fraction is not None else None,
        symbol=symbols[0] if symbols else None,
        also=tuple(symbols[1:MAX_ALSO]),
        because=(f"with it the residual of {holder.unit} is under the threshold",),
    ), found


def _merge_equal(diagnoses: Iterable[Diagnosis]) -> list[Diagnosis]:
    merged: dict[tuple[str, str | None], Diagnosis] = {}
    for d in diagnoses:
        key = (d.kind if d.kind == "not_weighting" else d.cause, d.factor)
        if key in merged:
            ranks = tuple(sorted({*merged[key].ranks, *d.ranks}))
            merged[key] = replace(merged[key], ranks=ranks)
        else:
            merged[key] = d
    return list(merged.values())
