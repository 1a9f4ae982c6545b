"""Rows of a parameter whose gradient is put together of other rows of what the ranks gave.

Where the values of sparse gradients are added in the order in which they stand, or touched rows
are exchanged without their numbers, a row gets what other ranks gave to rows of other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.own_gradients import (
    Columns,
    RowsGiven,
    columns_of,
    given_by_ranks,
    rows_given,
)
from torch import Tensor

MOST_SUMS = 1 << 18  # of one row of each other backward, that are tried for a row
FEWEST_COLUMNS = 2
FEWEST_ROWS = 2  # that have rows of other numbers
MOST_SHOWN = 2

Whose = Mapping[tuple[int, int], int]  # source and its backward -> which row of it is in it


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRows:
    """A parameter of a rank: by number of a wrong row, the rows that it is the sum of. untold:
    wrong rows that are no such sum, as where values of one row stand apart."""

    columns: Columns
    rows: Mapping[int, Whose]
    untold: int

    @property
    def of_others(self) -> Mapping[int, Whose]:
        """Those that have a row of another number."""
        return {i: whose for i, whose in self.rows.items() if {*whose.values()} - {i}}

    def in_words(self) -> str:
        """The first of these."""
        row, whose = next(iter(self.of_others.items()))
        sources, several = self.columns.sources, self.columns.passes > 1
        parts = [
            f"row {j} of " + (f"backward {p + 1} on " if several else "") + f"rank {sources[k][0]}"
            for (k, p), j in whose.items()
        ]
        cell = self.columns.cell
        return f"row {row} of {cell.name} on rank {cell.rank} is {' + '.join(parts)}"


def rows_of_other_numbers(case: Case, left: Left) -> Iterator[Explanation]:
    """Of every wrong gradient most wrong rows are the sum of the rank's own of that number and of
    one row, or none, of what each backward of another rank gave."""
    given = None if case.has_plan or not case.exact else given_by_ranks(case)
    if given is None:
        return
    found: list[OtherRows] = []
    for cell in case.failing_cells:
        columns = columns_of(cell, given, uneven=True)
        one = None if columns is None else _put_together(columns)
        if one is None:
            return
        found.append(one)
    if not found:
        return
    names = list(dict.fromkeys(one.columns.cell.name for one in found))
    shown = "; ".join(one.in_words() for one in found[:MOST_SHOWN])
    told, untold = sum(len(one.rows) for one in found), sum(one.untold for one in found)
    num = sum(len(one.of_others) for one in found)
    more = f"; of {told + untold} wrong rows on all ranks {num} have those of other numbers"
    more += f", {told - num} lack some or all of their own" if told > num else ""
    yield explained(
        case,
        Diagnosis(
            cause=f"rows of {some_of(names)} get what ranks gave to rows of other numbers: "
            f"{shown}{more}",
            kind="other_rows",
            ranks=tuple(sorted({one.columns.cell.rank for one in found})),
            standing="likely" if untold else "proved",
            because=(
                "what the ranks' own backwards gave is right: added up over all ranks, row by row, "
                "it is the right gradient",
                "look at what pairs values with the rows that they are of, as where values of "
                "sparse gradients are added in the order in which they stand",
            ),
        ),
    )


def _put_together(columns: Columns) -> OtherRows | None:
    """None where few wrong rows are such sums, or few have rows of other numbers."""
    given = rows_given(columns)
    if given is None:
        return None
    mine = next((k for k, s in enumerate(columns.sources) if columns.cell.rank in s), None)
    several = any(len(s) > 1 for s in columns.sources)
    if several or mine is None or given.got.shape[1] < FEWEST_COLUMNS:
        return None
    told = {row: _one_of_each(given, mine, row) for row in given.wrong}
    found = {row: whose for row, whose in told.items() if whose is not None}
    others = sum(bool({*whose.values()} - {row}) for row, whose in found.items())
    if 2 * len(found) < len(told) or others < FEWEST_ROWS:
        return None
    return OtherRows(columns=columns, rows=found, untold=len(told) - len(found))


def _one_of_each(given: RowsGiven, mine: int, row: int) -> Whose | None:
    """None unless there is one way."""
    own, num_passes = given.passes, given.passes.shape[1]
    live = {(k, p): _touched(own[k, p], given.tolerance)
            for k in range(len(own)) for p in range(num_passes)}  # fmt: skip
    others = {unit: rows for unit, rows in live.items() if unit[0] != mine}
    if math.prod(len(rows) + 1 for rows in others.values()) > MOST_SUMS:
        return None
    rest = given.got[row] - own[mine, :, row].sum(0)
    sums, ways = torch.zeros(1, len(rest), dtype=rest.dtype), torch.zeros(1, 0, dtype=torch.long)
    for unit, rows in others.items():
        more = torch.cat([own[unit][rows], own.new_zeros(1, len(rest))])
        number = torch.tensor([*rows, -1])
        sums = (sums[:, None] + more[None]).reshape(-1, len(rest))
        before = ways.repeat_interleave(len(more), 0)
        ways = torch.cat([before, number.repeat(len(ways))[:, None]], dim=1)
    near = ((sums - rest).abs().amax(1) <= given.tolerance).nonzero()[:, 0]
    if len(near) != 1:
        return None
    told = zip(others, ways[int(near)].tolist(), strict=True)
    of_mine = {(mine, p): row for p in range(num_passes) if row in live[mine, p]}
    return of_mine | {unit: j for unit, j in told if j >= 0}


def _touched(rows: Tensor, tolerance: float) -> list[int]:
    found: list[int] = (rows.abs().amax(1) > tolerance).nonzero()[:, 0].tolist()
    return found
