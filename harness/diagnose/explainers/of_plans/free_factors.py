"""When no edge of the plan explains a failure: free factors on partials, holder by holder.

One factor, then two, then one for each term, then least squares over row intervals. What none of
them explains under the threshold is no weighting bug, and is not called one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import torch
from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis, RecoveredCoefficient
from sumgrad.diagnose.case import Case, Holder, column, deviation, recovered, size_of, whole_terms
from sumgrad.diagnose.explainers.of_plans.hypotheses import factor_names
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import Fit, as_fraction, fit_deviation
from sumgrad.plan.proof import Coefficient
from torch import Tensor

MAX_INTERVALS = 48
MAX_ALSO = 4
MIN_EXPLAINED = 0.99
MIN_ELEMENTS = 3  # per free factor: fewer elements explain themselves


Grouping = tuple[str, list[list[Coefficient]]]


def fewest_factors(case: Case, left: Left) -> Iterator[Explanation]:
    """Each holder by the fewest free factors that explain it; equal causes together.

    Outside float64 only where no edge explains anything: a few factors fit noise.
    """
    if not case.has_plan or not (case.exact or len(left) == case.parts):
        return
    evidence = tuple(f"the ledger differs from the plan: {m}" for m in case.mismatches[:2])
    merged: dict[tuple[str, str | None], Explanation] = {}
    for i in sorted(left):
        found, coefficients = _fit_holder(case, case.failing[i])
        key = (found.kind if found.kind == "open" else found.cause, found.factor)
        held = merged.get(key)
        measured = held.coefficients(left) if held else ()
        diagnosis = held.diagnosis if held else replace(found, because=found.because + evidence)
        ranks = tuple(sorted({*(held.diagnosis.ranks if held else ()), *found.ranks}))
        merged[key] = Explanation(
            diagnosis=replace(diagnosis, ranks=ranks if held else found.ranks),
            explains=frozenset({i}) | (held.explains if held else frozenset()),
            complexity=held.complexity if held else i,
            coefficients=partial(_given, (*measured, *coefficients)),
        )
    yield from merged.values()


def _given(found: Sequence[RecoveredCoefficient], _: Left) -> Sequence[RecoveredCoefficient]:
    return found


def _fit_holder(case: Case, holder: Holder) -> tuple[Diagnosis, list[RecoveredCoefficient]]:
    nearest, share = "nothing", 0.0
    for level in _levels(case, holder):
        fitting: list[tuple[str, list[list[Coefficient]], Fit]] = []
        for label, groups in level:
            columns = [_sum_columns(case, holder, group) for group in groups]
            if len(deviation(holder)) < MIN_ELEMENTS * len(columns):
                continue
            fit = fit_deviation(columns, deviation(holder))
            if fit.explained > share:
                nearest, share = label, fit.explained
            if _explains(holder, fit):
                fitting.append((label, groups, fit))
        if fitting:
            return _free_factor(case, holder, fitting)
    return Diagnosis(
        cause=f"open: {holder.unit} is wrong on rank {spans(holder.ranks)} and no cause of it is "
        f"proved",
        kind="open",
        standing="open",
        ranks=holder.ranks,
        because=("no fit leaves a residual under the threshold and explains the deviation",),
        however=(f"{nearest} explains {share:.4%} of the deviation",),
    ), []


def _levels(case: Case, holder: Holder) -> Iterator[list[Grouping]]:
    """Sets of cells that get one free factor each, fewest factors first; no two sets overlap."""
    terms = whole_terms(case, holder)
    yield [("one factor on everything", [terms])]
    single = _single_groups(case, terms)
    yield [(label, [group]) for label, group in single]
    yield [
        (f"{label_a} and {label_b}", [a, b])
        for (label_a, a), (label_b, b) in combinations(single[: 3 * len(terms)], 2)
        if not _overlap(a, b)
    ]
    yield [("a factor on each term", [[t] for t in terms])]
    intervals = [cell for t in terms for cell in _intervals(case, t)]
    if len(intervals) <= MAX_INTERVALS:
        yield [("a factor on each term and row interval", [[cell] for cell in intervals])]


def _single_groups(case: Case, terms: Sequence[Coefficient]) -> list[tuple[str, list[Coefficient]]]:
    """A term, a term of one producer, a rank's rows; equal sets of cells once."""
    named = sorted({t.term for t in terms})
    groups = [(f"a factor on {name}", [t for t in terms if t.term == name]) for name in named]
    groups += [(f"a factor on {t.term} of {t.producer}", [t]) for t in terms]
    groups += _by_rank_rows(case, terms)
    seen: set[frozenset[tuple[object, ...]]] = set()
    out = []
    for label, group in groups:
        key = frozenset((c.term, c.producer, c.rows) for c in group)
        if key not in seen:
            seen.add(key)
            out.append((label, group))
    return out


def _overlap(a: Sequence[Coefficient], b: Sequence[Coefficient]) -> bool:
    """Whether some row of some term is in both."""
    return any(
        (x.term, x.producer) == (y.term, y.producer)
        and (
            x.rows is None
            or y.rows is None
            or max(x.rows[0], y.rows[0]) < min(x.rows[1], y.rows[1])
        )
        for x in a
        for y in b
    )


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


def _explains(holder: Holder, fit: Fit) -> bool:
    """The residual is under the threshold, most of the deviation is gone, and a factor is not 1."""
    factor = max([1.0, *(abs(v) for v in fit.values if v is not None)])
    start = 0
    for wanted in holder.expected.values():
        part = fit.residual[start : start + wanted.value.numel()]
        start += wanted.value.numel()
        if float(part.abs().max()) * size_of(wanted) > wanted.threshold * factor:
            return False
    changed = [
        abs(value - 1) > 5 * sigma
        for value, sigma in zip(fit.values, fit.sigmas, strict=True)
        if value is not None and sigma is not None
    ]
    return fit.explained >= MIN_EXPLAINED and (any(changed) or None in fit.values)


def _free_factor(
    case: Case, holder: Holder, fitting: Sequence[tuple[str, list[list[Coefficient]], Fit]]
) -> tuple[Diagnosis, list[RecoveredCoefficient]]:
    """The first fitting grouping in words; where several fit, no coefficient is determined."""
    label, groups, fit = fitting[0]
    alone = len(fitting) == 1
    readings = []
    found = []
    for group, value, sigma in zip(groups, fit.values, fit.sigmas, strict=True):
        fraction = as_fraction(value, sigma)
        readings.append((fraction, value))
        known = (value, sigma) if alone else (None, None)
        found += [recovered(case, holder, cell, *known) for cell in group]
    odd = [r for r in readings if r[1] is not None and abs(r[1] - 1) > 1e-6] or readings
    fraction, value = odd[0]
    symbols = factor_names(case.plan).get(fraction, []) if fraction not in (None, 1) else []
    text = str(fraction) if fraction is not None else f"{value:.9g}" if value else "?"
    several = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
    others = [other for other, _, _ in fitting[1:]]
    terms = {cell.term for group in groups for cell in group}
    return Diagnosis(
        cause=f"{label}: {text}{' = ' + symbols[0] if symbols else ''}{several}, "
        f"which no single edge of the plan explains",
        kind="free_factor",
        term=terms.pop() if len(terms) == 1 else None,
        ranks=holder.ranks,
        factor=str(fraction) if fraction is not None else None,
        symbol=symbols[0] if symbols else None,
        also=tuple([*others, *symbols[1:]][:MAX_ALSO]),
        because=(f"with it the residual of {holder.unit} is under the threshold",),
        however=("other groups of terms fit as well, so no coefficient is determined",)
        if others
        else (),
    ), found
