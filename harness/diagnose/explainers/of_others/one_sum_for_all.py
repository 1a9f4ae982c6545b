"""Parameters of one shape that all hold the same: the sum of what belongs to each of them.

As where a list of buffers is one buffer several times, or a key is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.judge.cells import Cell

SAME = 1e-12  # of the largest number: a reduction may add up in another order
ROUNDINGS = 8  # of the thresholds, added up


def one_sum_for_all(case: Case, left: Left) -> Iterator[Explanation]:
    """Where every wrong gradient is such a sum, on its rank."""
    if not case.exact:
        return
    groups: list[list[Cell]] = []
    for cell in case.failing_cells:
        same = next((own for own in groups if _hold_the_same(own[0], cell)), None)
        if same is None:
            groups.append([cell])
        else:
            same.append(cell)
    if not groups or not all(len(own) > 1 and _is_the_sum(own) for own in groups):
        return
    sets = list(dict.fromkeys(tuple(c.name for c in own) for own in groups))
    names = sets[0]
    others = [n for own in sets[1:] for n in own]
    too = f"; and so {some_of(others)}, each with those of its shape" if others else ""
    yield explained(
        case,
        Diagnosis(
            cause=f"{some_of(list(names))} all hold the same, the sum of the right gradients of "
            f"all {len(names)}{too}: look for one buffer, or one key, that is used for all of them",
            kind="shared_buffer",
            standing="proved",
            ranks=tuple(sorted({c.rank for c in case.failing_cells})),
            because=("so added up, the right gradients are what each holds, within the "
                     "thresholds",),
        ),
    )  # fmt: skip


def _hold_the_same(a: Cell, b: Cell) -> bool:
    same = a.rank == b.rank and a.measured.shape == b.measured.shape and a.name != b.name
    return same and float((a.measured - b.measured).abs().max()) <= SAME * float(
        a.measured.abs().max()
    )


def _is_the_sum(cells: Sequence[Cell]) -> bool:
    """Whether what all of these hold is the sum of what they should, and not of nothing."""
    if any(not bool(c.wanted.value.any()) for c in cells):
        return False
    total = torch.stack([c.wanted.value.double() for c in cells]).sum(0)
    bound = ROUNDINGS * sum(c.wanted.threshold for c in cells)
    return float((cells[0].measured - total).abs().max()) <= bound
