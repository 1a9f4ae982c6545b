"""Parts of a gradient that are zero at the end, and that the ranks' own backwards gave right.

As where a hook masks rows of a table by their numbers in a shard: every backward is right, what the
ranks gave adds up to the right gradient, and some of it is cleared since.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.own_gradients import Columns, columns_of, given_by_ranks
from sumgrad.judge.cells import Cell
from torch import Tensor

MOST_SHOWN = 4


def zeroed_after(case: Case, left: Left) -> Iterator[Explanation]:
    """Where it is so of every wrong gradient, and not of all that is there of a parameter."""
    given = None if case.has_plan or not case.exact else given_by_ranks(case)
    if given is None:
        return
    gone = False
    for cell in case.failing_cells:
        columns = columns_of(cell, given, uneven=True)
        if columns is None or not _is_cleared(columns):
            return
        gone = gone or _gave_some_itself(columns)
    names = list(dict.fromkeys(c.name for c in case.failing_cells))
    if not gone or not all(_is_there_in_part(case.cells, name) for name in names):
        return
    whose = "" if len(names) == 1 else "of {} "
    places: dict[str, list[int]] = {}
    for cell in case.failing_cells:
        where = f"{whose.format(cell.name)}{_where(case, cell)}"
        places.setdefault(where, []).append(cell.rank)
    told = [f"{where} on rank {spans(ranks)}" for where, ranks in places.items()]
    more = f" and {len(told) - MOST_SHOWN} more" if len(told) > MOST_SHOWN else ""
    yield explained(
        case,
        Diagnosis(
            cause=f"a part of {some_of(names)} is zero at the end, and should not be: "
            f"{', '.join(told[:MOST_SHOWN])}{more}; what the ranks' own backwards gave adds up to "
            f"the right gradient there: look for what clears it after them, or leaves it out (a "
            f"hook, a mask, an index, a part of a buffer, a `.grad` that is reset in between)",
            kind="zeroed",
            standing="proved",
            ranks=tuple(sorted({c.rank for c in case.failing_cells})),
            because=(
                "added up over all ranks, what their own backwards gave is the right gradient, "
                "there and in what else these ranks hold",
            ),
        ),
    )


def _wrong(cell: Cell) -> Tensor:
    """Which elements of what a rank holds are not right."""
    return (cell.measured - cell.wanted.value).abs() > cell.wanted.threshold


def _is_cleared(columns: Columns) -> bool:
    """Whether all that is wrong is zero, and what the ranks gave adds up to what is right."""
    wrong = (columns.measured - columns.wanted).abs() > columns.cell.wanted.threshold
    if not bool(wrong.any()) or bool(columns.cell.measured[_wrong(columns.cell)].any()):
        return False
    often = torch.tensor([len(source) for source in columns.sources], dtype=torch.float64)
    total = often.repeat_interleave(columns.passes) @ columns.own
    squares = float(total @ total)
    factor = float(total @ columns.wanted) / squares if squares else 0.0
    off = (factor * total - columns.wanted).abs().max()
    return bool(factor) and float(off) <= columns.cell.wanted.threshold


def _gave_some_itself(columns: Columns) -> bool:
    """Whether the rank's own backwards gave something there, which a gradient that is only not
    reduced would have."""
    wrong = (columns.measured - columns.wanted).abs() > columns.cell.wanted.threshold
    own = columns.own.reshape(len(columns.sources), columns.passes, -1)
    mine = next((i for i, s in enumerate(columns.sources) if columns.cell.rank in s), None)
    return mine is not None and bool(own[mine][:, wrong].any())


def _is_there_in_part(cells: Sequence[Cell], name: str) -> bool:
    """Whether some rank has some of it: else all of it is lost, which is another mistake."""
    return any(bool(c.got.any()) for c in cells if c.name == name and c.got is not None)


def _where(case: Case, cell: Cell) -> str:
    """`rows 5-8`, or columns, as the whole parameter counts them; else how many elements."""
    shape = case.reference.grads[cell.name].shape
    wrong, live = _wrong(cell).reshape(-1), (cell.wanted.value != 0).reshape(-1)
    at = torch.arange(len(wrong)) if cell.index is None else cell.index.reshape(-1)
    width = shape[1:].numel() if len(shape) > 1 else 1
    lines = [("rows" if len(shape) > 1 else "elements", at // width)]
    lines += [("columns", at % width)] if len(shape) == 2 else []
    for unit, number in lines:
        numbers = number[wrong].unique()
        if not bool((torch.isin(number, numbers) & live & ~wrong).any()):
            return f"{unit} {spans(numbers.tolist())}"
    return f"{int(wrong.sum())} of {len(wrong)} elements"
