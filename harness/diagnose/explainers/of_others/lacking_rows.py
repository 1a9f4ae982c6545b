"""Rows of a parameter whose gradient lacks what some ranks gave: each told by itself.

Where a table's touched rows are exchanged, a flat buffer is cut, or a part of one is read too
early, some rows of a gradient are whole and others are sums over fewer ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.own_gradients import Columns, columns_of, given_by_ranks, rows_given
from torch import Tensor

ROUNDED = 1e-4  # a weight that is nought or one
MOST_SHOWN = 4

Lacking = dict[tuple[int, ...], list[int]]  # ranks -> rows that lack theirs


def rows_lack_ranks(case: Case, left: Left) -> Iterator[Explanation]:
    """Every wrong row of every wrong gradient is the sum of what some of the ranks gave it."""
    given = None if case.has_plan or not case.exact else given_by_ranks(case)
    if given is None:
        return
    found: list[tuple[Columns, Lacking]] = []
    for cell in case.failing_cells:
        columns = columns_of(cell, given, uneven=True)
        lacking = None if columns is None else _lacking(columns)
        if columns is None or not lacking:
            return
        found.append((columns, lacking))
    names = list(dict.fromkeys(c.cell.name for c, _ in found))
    told = [
        f"{c.cell.name} on rank {c.cell.rank} lacks what rank {spans(list(ranks))} gave in rows "
        f"{spans(rows)}"
        for c, lacking in found
        for ranks, rows in lacking.items()
    ]
    more = f"; and {len(told) - MOST_SHOWN} more" if len(told) > MOST_SHOWN else ""
    yield explained(
        case,
        Diagnosis(
            cause=f"some rows of {some_of(names)} are a sum over too few ranks, the others are "
            f"whole: {'; '.join(told[:MOST_SHOWN])}{more}",
            kind="too_few_ranks",
            ranks=tuple(sorted({c.cell.rank for c, _ in found})),
            standing="proved",
            because=(
                "what the ranks' own backwards gave is right: added up over all ranks it is the "
                "right gradient",
            ),
        ),
    )


def _lacking(columns: Columns) -> Lacking | None:
    """None where a row is no such sum, or where they are not told."""
    given = rows_given(columns)
    if given is None:
        return None
    often = torch.tensor([len(s) for s in columns.sources], dtype=torch.float64)
    found: Lacking = {}
    for i in given.wrong:
        without = _without(given.rows[:, i], often, given.got[i], given.tolerance)
        if without is None:
            return None
        ranks = tuple(sorted(r for k in without for r in columns.sources[k]))
        found.setdefault(ranks, []).append(i)
    return found


def _without(rows: Tensor, often: Tensor, got: Tensor, tolerance: float) -> list[int] | None:
    """Which sources are not in a row."""
    live = [k for k in range(len(rows)) if float(rows[k].abs().max()) > tolerance]
    if not live or rows.shape[1] <= len(live):
        return None
    own = (often[live, None] * rows[live]).T
    if int(torch.linalg.matrix_rank(own, rtol=1e-9)) < len(live):
        return None
    weights = torch.linalg.lstsq(own, got[:, None], driver="gelsd").solution[:, 0]
    there = weights.round()
    alike = bool(((there == 0) | (there == 1)).all()) and bool(
        (weights - there).abs().max() < ROUNDED
    )
    if not alike or float((own @ there - got).abs().max()) > tolerance:
        return None
    return [k for k, weight in zip(live, there.tolist(), strict=True) if not weight]
