"""Whole numbers that enter a module, as tokens and positions do, beside the single process's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.record.trace import Trace
from torch import Tensor

FEWEST = 3  # elements that are the same, of which two are different, for a row to be told


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A row of what enters on a rank, that is no stretch of any of the single process's.

    call: of those with such data, in order. row: of the rank's. of: the single process's row that
    it has most of, if one is told. by: places to the right of that one's; where 0, `others` says in
    how many of its `size` elements it is another, the first of which is at place `at`.
    """

    call: int
    row: int
    of: int | None = None
    by: int = 0
    others: int = 0
    size: int = 0
    at: int = 0
    now: int = 0
    was: int = 0

    @property
    def is_nearly_one(self) -> bool:
        """Whether it is a row of the single process's but for few of its elements."""
        return self.of is not None and not self.by and 4 * self.others <= self.size


def odd_rows(mine: Trace, single: Trace, module: str) -> Iterator[Odd]:
    there = [row for data in _numbers(single, module) for row in data]
    if not there:
        return
    for call, data in enumerate(_numbers(mine, module)):
        for i, row in enumerate(data):
            if not any(_is_stretch(row, whole) for whole in there):
                yield _told(call, i, row, there)


def _numbers(trace: Trace, module: str) -> list[Tensor]:
    pairs = zip(trace.entered, trace.data, strict=True)
    return [d for name, d in pairs if name == module and d.dim() == 2 and _is_whole(d)]


def _is_whole(data: Tensor) -> bool:
    return not data.is_floating_point() and data.dtype != torch.bool and data.numel() > 0


def _is_stretch(row: Tensor, whole: Tensor) -> bool:
    if len(row) > len(whole):
        row, whole = whole, row
    return bool((whole.unfold(0, len(row), 1) == row).all(1).any())


def _told(call: int, i: int, row: Tensor, there: list[Tensor]) -> Odd:
    for by in range(1, len(row) - FEWEST + 1):
        for at, whole in enumerate(there):
            for places, part, other in ((by, row[by:], whole), (-by, row[:-by], whole[by:])):
                n = min(len(part), len(other))
                if n >= FEWEST and len(part[:n].unique()) > 1 and torch.equal(part[:n], other[:n]):
                    return Odd(call=call, row=i, of=at, by=places)
    alike = [
        int((row[: len(whole)] == whole[: len(row)]).sum()) if len(whole) else 0 for whole in there
    ]
    best = max(range(len(there)), key=alike.__getitem__)
    if 2 * alike[best] > len(row) and alike.count(alike[best]) == 1:
        n = min(len(row), len(there[best]))
        at = int((row[:n] != there[best][:n]).nonzero()[0]) if alike[best] < n else n
        now, was = (int(r[at]) if at < len(r) else -1 for r in (row, there[best]))
        others = len(row) - alike[best]
        return Odd(call=call, row=i, of=best, others=others, size=len(row), at=at, now=now, was=was)
    return Odd(call=call, row=i)
