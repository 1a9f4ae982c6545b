"""Rows of several parts each, as the choices of a question, that are put together of other rows'
parts as they enter a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.inputs.entered import FEWEST, is_stretch
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace
from torch import Tensor

MOST_PARTS = 1 << 8  # of a rank's call, and as many of the single process's


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A row of what a call is handed as `name`, and of each of its parts the row and the part of
    the single process's that it is. made: the line that made it, where it is a user's."""

    call: int
    row: int
    name: str
    of: tuple[tuple[int, int], ...]
    made: Line


def joined_parts(mine: Trace, single: Trace, module: str) -> Iterator[Joined]:
    """Of whole numbers (rows, parts, n), each part told by its values: rows whose parts are all
    there, and in no row of the single process together in this order: a stretch of a row's is what
    a rank may hold of it."""
    for of, (call, name), data, made in zip(
        mine.entered, mine.entered_as, mine.data, mine.entered_at, strict=False
    ):
        there = _there(single, module, name) if of == module and _has_parts(data) else []
        for row, parts in enumerate(data if there else ()):
            found = [_places(part, there) for part in parts]
            if not all(len(places) == 1 for places in found):
                continue
            at = tuple(places[0] for places in found)
            row_there, first = at[0]
            if at != tuple((row_there, first + i) for i in range(len(at))):
                yield Joined(call=call, row=row, name=name, of=at, made=made)


def _has_parts(data: Tensor) -> bool:
    whole = not data.is_floating_point() and data.dtype != torch.bool
    return whole and data.dim() == 3 and 0 < data.shape[0] * data.shape[1] <= MOST_PARTS


def _there(single: Trace, module: str, name: str) -> list[tuple[tuple[int, int], Tensor]]:
    """All parts that are handed there as that, by row and part."""
    return [
        ((r, p), part)
        for of, (_, argument), data in zip(
            single.entered, single.entered_as, single.data, strict=False
        )
        if (of, argument) == (module, name) and _has_parts(data)
        for r, row in enumerate(data)
        for p, part in enumerate(row)
    ]


def _places(part: Tensor, there: list[tuple[tuple[int, int], Tensor]]) -> list[tuple[int, int]]:
    """Where a part stands; nowhere where it is like many."""
    if len(part.unique()) < FEWEST:
        return []
    return [at for at, whole in there if is_stretch(part, whole)]
