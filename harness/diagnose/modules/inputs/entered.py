"""Whole numbers that enter a module, as tokens and positions do, beside the single process's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from sumgrad.record.trace import Trace
from torch import Tensor

FEWEST_ROWS = 2  # by which the places of all are told
MOST_TRIED = 1 << 12  # pairs of rows
FEWEST = 3  # elements that are the same, of which two are different, for a row to be told


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """A row of what enters on a rank, that is no stretch of any of the single process's.

    call: of the module's. name: of the argument, where there are several such. row: of the rank's.
    of: the single process's row that it has most of, if one is told. by: places to
    the right of that one's; where 0, `others` says in how many of its `size` elements it is
    another, the first of which is at place `at`.
    """

    call: int
    row: int
    name: str = ""
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
    whole, own = _numbers(single, module), _numbers(mine, module)
    several = len(whole) > 1
    for name, calls in own.items():
        there = [row for _, data in whole.get(name, ()) for row in data]
        apart = [c for c in calls if there and not _are_numbered_anew(c, mine, single, module)]
        found = [
            replace(_told(call, i, row, there), name=name if several else "")
            for call, data in apart
            for i, row in enumerate(data)
            if not any(is_stretch(row, other) for other in there)
        ]
        shifted = any(one.by for one in found)
        if shifted or not are_taken_alike([row for _, data in calls for row in data], there):
            yield from found


def row_of(trace: Trace, module: str, odd: Odd, field: Tensor) -> int | None:
    """Of (rows, n) the one row that a row of what enters is, or is a stretch of."""
    if not is_whole(field):
        return None
    held = _numbers(trace, module)
    of = held.get(odd.name) if odd.name else next(iter(held.values()), None)
    row = next((data[odd.row] for call, data in of or () if call == odd.call), None)
    if row is None or len(row.unique()) < FEWEST:
        return None
    found = [i for i, whole in enumerate(field) if is_stretch(row, whole.to(row))]
    return found[0] if len(found) == 1 else None


def _numbers(trace: Trace, module: str) -> dict[str, list[tuple[int, Tensor]]]:
    """Argument -> the number of each call, and what is handed there. Where arguments have no
    names, as one."""
    out: dict[str, list[tuple[int, Tensor]]] = {}
    named = trace.entered_as or ((None, ""),) * len(trace.entered)
    for module_of, (call, name), data in zip(trace.entered, named, trace.data, strict=True):
        if module_of == module and is_whole(data):
            held = out.setdefault(name, [])
            held.append((len(held) if call is None else call, data))
    return out


def _are_numbered_anew(own: tuple[int, Tensor], mine: Trace, single: Trace, module: str) -> bool:
    """Whether these are numbers of the rows of something else that is handed there in that call,
    of which a rank has not as many: nodes of a part of a graph."""
    call, data = own
    most, there = int(data.max()) + 1, {len(t) for t in _features(single, module, None)}
    return any(len(t) == most and len(t) not in there for t in _features(mine, module, call))


def _features(trace: Trace, module: str, call: int | None) -> Iterator[Tensor]:
    for of, (number, _), data in zip(trace.entered, trace.entered_as, trace.data, strict=False):
        if of == module and call in (None, number) and data.is_floating_point() and data.dim() > 1:
            yield data


def is_whole(data: Tensor) -> bool:
    """Whether it is lines of whole numbers."""
    return (
        data.dim() == 2
        and not data.is_floating_point()
        and data.dtype != torch.bool
        and data.numel() > 0
    )


def are_taken_alike(rows: Sequence[Tensor], there: Sequence[Tensor]) -> bool:
    """Whether rows of one length are, each of some row there, what stands at the same places of
    all: as a rank of a sequence that is cut in a zigzag has them. Of one row any order would be."""
    if len(rows) < FEWEST_ROWS or len({len(row) for row in rows}) > 1 or len(rows[0]) < FEWEST:
        return False
    tried = 0

    def fits(i: int, places: Tensor) -> bool:
        """places: (n, N) bool, where each of the n elements may stand in the rows before row i."""
        nonlocal tried
        if i == len(rows):
            return int(places.any(0).sum()) >= len(places)
        for whole in there:
            tried += 1
            if tried > MOST_TRIED or len(whole) != places.shape[1]:
                return False
            left = places & (rows[i][:, None] == whole[None])
            if bool(left.any(1).all()) and fits(i + 1, left):
                return True
        return False

    size = len(there[0]) if there else 0
    return size >= len(rows[0]) and fits(0, torch.ones(len(rows[0]), size, dtype=torch.bool))


def is_stretch(row: Tensor, whole: Tensor) -> bool:
    """Whether (n,) is a stretch of (N,), or the other way round."""
    if len(row) > len(whole):
        row, whole = whole, row
    return bool((whole.unfold(0, len(row), 1) == row).all(1).any())


def _told(call: int, i: int, row: Tensor, there: list[Tensor]) -> Odd:
    if len(row.unique()) < FEWEST:
        return Odd(call=call, row=i)  # zeros and ones are like many
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
    long, short = sorted((len(row), len(there[best])))[::-1]
    if 2 * alike[best] > len(row) and alike.count(alike[best]) == 1 and 4 * short >= 3 * long:
        n = min(len(row), len(there[best]))
        at = int((row[:n] != there[best][:n]).nonzero()[0]) if alike[best] < n else n
        now, was = (int(r[at]) if at < len(r) else -1 for r in (row, there[best]))
        others = len(row) - alike[best]
        return Odd(call=call, row=i, of=best, others=others, size=len(row), at=at, now=now, was=was)
    return Odd(call=call, row=i)
