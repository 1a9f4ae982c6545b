"""Numbers that count in a softmax on a rank, and do not in the single process, or the other way
round: a mask that lets more through, or less."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.numbers import CLOSE
from sumgrad.record.computed import Computation, Computed
from torch import Tensor

SOFTMAX = {"softmax", "log_softmax"}
BELOW = 745.0  # what is so far below the largest number is nothing beside it, in float64
FEWEST = 2  # numbers that two rows have in common
MOST_ROWS = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedOtherwise:
    """The first row in which the softmax of a rank is another than the single process's: vector
    `row`, in which `now` numbers count, of which in the single process `was` do. num: in how many
    rows more count, or fewer, as in the first."""

    row: int
    now: int
    was: int
    num: int


def masked_otherwise(
    c: Computation, mine: Computed, known: KnownRows | None
) -> MaskedOtherwise | None:
    """Where every row that is another has the single process's numbers and some more that count, or
    some fewer; None where any is otherwise wrong, or cannot be told."""
    rows = _rows(mine.values[c.uses[0]]) if c.function in SOFTMAX and c.uses else None
    if rows is None or known is None:
        return None
    odd: list[tuple[int, int, int]] = []
    reached = _reached(mine, c)
    for i, row in enumerate(rows):
        live = _counting(row)
        if len(live) < FEWEST or not (reached is None or reached[i]):
            continue
        was = known.most_like(live)
        if was is None:
            return None
        num, common = was
        if common < min(len(live), num) or num > row.numel():
            return None  # other numbers, or a part of the keys
        if num != len(live):
            odd.append((i, len(live), num))
    if not odd:
        return None
    first, now, before = odd[0]
    alike = sum((n > w) == (now > before) for _, n, w in odd)
    return MaskedOtherwise(row=first, now=now, was=before, num=alike)


def known_rows(function: str, whole: Computed) -> KnownRows | None:
    """What the single process's calls of a softmax take; None where that cannot be told."""
    there = [
        _rows(whole.values[w.uses[0]])
        for w in whole.computations
        if w.function == function and w.uses
    ]
    if function not in SOFTMAX or not there or any(one is None for one in there):
        return None
    return KnownRows([row for one in there if one is not None for row in one])


class KnownRows:
    """Rows of the single process, by the numbers that count in them."""

    def __init__(self, rows: list[Tensor]) -> None:
        live = [_counting(row) for row in rows]
        self._sizes = [len(one) for one in live]
        numbers = torch.cat(live)
        self._numbers, order = numbers.sort()
        self._owners = torch.repeat_interleave(
            torch.arange(len(live)), torch.tensor(self._sizes, dtype=torch.long)
        )[order]

    def most_like(self, live: Tensor) -> tuple[int, int] | None:
        """How many numbers count in the row that has the most of these, and how many it has."""
        width = CLOSE * live.abs()
        low = torch.searchsorted(self._numbers, live - width).tolist()
        high = torch.searchsorted(self._numbers, live + width, right=True).tolist()
        often: Counter[int] = Counter()
        for start, end in zip(low, high, strict=True):
            often.update({*self._owners[start:end].tolist()})
        if not often:
            return None
        best = max(often.values())
        if best < FEWEST:
            return None
        sizes = {self._sizes[row] for row, num in often.items() if num == best}
        # Of several that have as many, one that has no more is the same row.
        size = len(live) if best == len(live) and len(live) in sizes else min(sizes)
        return size, best


def _rows(value: Tensor) -> Tensor | None:
    """(n, K) float64; None where these are too many, or have few digits."""
    if value.dtype != torch.float64 or not value.dim():
        return None
    rows = value.reshape(-1, value.shape[-1])
    return rows if len(rows) <= MOST_ROWS else None


def _reached(mine: Computed, c: Computation) -> Tensor | None:
    """(n,) bool: rows that a gradient reaches, as it does no padding; None where none is known."""
    held = [own[n] for own in mine.gradients for n in c.gives if n in own]
    return torch.stack([g.reshape(-1, g.shape[-1]) for g in held]).any(0).any(1) if held else None


def _counting(row: Tensor) -> Tensor:
    finite = row[row.isfinite()]
    return finite[finite > finite.max() - BELOW] if len(finite) else finite
