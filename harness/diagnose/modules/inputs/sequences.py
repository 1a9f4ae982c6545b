"""Rows that are put together of vectors which stand in several rows of the single process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.record.trace import Trace
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Row `row` of a rank's call. places: in it, those of each row of the single process."""

    rank: int
    call: int
    row: int
    places: tuple[tuple[int, ...], ...]


def joined_rows(single: Trace, seen: Sequence[Seen]) -> list[Joined]:
    """Of tensors (..., places, C) all of whose vectors are found, the rows that no row of one call
    of the single process has by itself. Vectors that several rows there have tell nothing."""
    out: list[Joined] = []
    every = {
        key: _row_of_each(single, *key) for key in {(s.call.module, s.call.part) for s in seen}
    }
    for s in seen:
        of = every[s.call.module, s.call.part]
        if of is None or s.where is None or len(s.shape) < 3 or len(of) != s.where.found.shape[1]:
            continue
        each = s.shape[-2]
        for row in range(math.prod(s.shape[:-2])):
            mine = (s.where.picked // each == row).nonzero()[:, 0].tolist()
            held = [of[s.where.found[i]].unique().tolist() for i in mine]
            if any(len(rows) != 1 for rows in held):
                continue
            by_row: dict[int, list[int]] = {}
            for i, (of_one,) in zip(mine, held, strict=True):
                by_row.setdefault(of_one, []).append(int(s.where.picked[i]) % each)
            if len(by_row) > 1:
                places = tuple(tuple(own) for own in by_row.values())
                out.append(Joined(rank=s.rank, call=s.call.number, row=row, places=places))
    return out


def _row_of_each(single: Trace, module: str, part: int) -> Tensor | None:
    """(N,) a number of the row that each vector stands in, counted over all calls."""
    found, rows = list[Tensor](), 0
    for call, output in zip(single.calls, single.outputs, strict=True):
        if (call.module, call.part) != (module, part) or call.recomputed:
            continue
        if output.dim() < 3:
            return None
        num = output.shape[:-2].numel()
        found.append(torch.arange(rows, rows + num).repeat_interleave(output.shape[-2]))
        rows += num
    return torch.cat(found) if found else None
