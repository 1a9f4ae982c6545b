"""Parts of one row that a module is handed together, and that do not belong together.

A row of tokens tells by its values which row of the single process it is. What is handed beside it,
as types of tokens, a mask, an image, a name in a list, must be that row's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from sumgrad.record.trace import Trace
from torch import Tensor

FEWEST_VALUES = 3  # different ones in a row that tells which it is
CLOSE = 1e-5
MASK = "mask"  # in the name of an argument that says what is padding

Arguments = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """Of one row of a rank's call: `told` says that it is the single process's row `of`; what it
    is handed as `name` is not that row's, but that of the rows `whose`. Where both are one number
    for each place: at `others` of `size` places, the first of which is `at`."""

    call: int
    row: int
    told: str
    of: int
    name: str
    whose: tuple[int, ...] = ()
    others: int = 0
    size: int = 0
    at: int = 0
    now: float = 0.0
    was: float = 0.0


@dataclass(frozen=True, slots=True)
class _At:
    """Where a row is in the single process: in which call, which row, from which place on."""

    call: int
    row: int
    start: int


def odd_companions(mine: Trace, single: Trace, module: str) -> Iterator[Odd]:
    there = [arguments for _, arguments in _calls(single, module)]
    for call, arguments in _calls(mine, module):
        for told, tokens in arguments.items():
            if not _tells(tokens) or not all(told in other for other in there):
                continue
            for row in range(len(tokens)):
                found = _odd(call, row, told, arguments, there)
                if found is not None:
                    yield found
            break


def _calls(trace: Trace, module: str) -> list[tuple[int, Arguments]]:
    """By number of the call, what it was handed by name; where a name is there twice, nothing."""
    out: dict[int, dict[str, Tensor]] = {}
    twice: set[tuple[int, str]] = set()
    for name, (call, argument), data in zip(
        trace.entered, trace.entered_as, trace.data, strict=False
    ):
        if name == module and argument and data.dim() and not data.is_complex():
            if argument in out.setdefault(call, {}):
                twice.add((call, argument))
            out[call][argument] = data
    for call, argument in twice:
        del out[call][argument]
    return sorted(out.items())


def _tells(tokens: Tensor) -> bool:
    whole = not tokens.is_floating_point() and tokens.dtype != torch.bool
    return tokens.dim() == 2 and whole and all(len(r.unique()) >= FEWEST_VALUES for r in tokens)


def _odd(
    call: int, row: int, told: str, arguments: Arguments, there: list[Arguments]
) -> Odd | None:
    """None where some row of the single process has all that this one has, or none is told."""
    places = list(_places(arguments[told][row], told, there))
    if not places or len({(at.call, at.row) for at in places}) > 1:
        return None
    first: Odd | None = None
    for at in places:
        odd = _beside(call, row, told, arguments, there[at.call], at)
        if odd is None:
            return None
        first = first or odd
    return first


def _places(tokens: Tensor, told: str, there: list[Arguments]) -> Iterator[_At]:
    """Where a row is a stretch of the single process's, or such a one is a stretch of it."""
    for call, arguments in enumerate(there):
        whole = arguments[told]
        if whole.dim() != 2:
            continue
        width, wide = len(tokens), whole.shape[1]
        for start in range(min(0, wide - width), max(0, wide - width) + 1):
            part, other = _overlap(tokens, whole, start)
            for row in (part == other).all(1).nonzero()[:, 0].tolist():
                yield _At(call, row, start)


def _overlap(tokens: Tensor, whole: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Of a row (w,) and of rows (n, W) what stands at the same places, if the row begins at
    `start` of theirs, which may be before them."""
    part, other = tokens[max(0, -start) :], whole[..., max(0, start) :]
    length = min(part.shape[-1], other.shape[-1])
    return part[:length], other[..., :length]


def _beside(
    call: int, row: int, told: str, arguments: Arguments, there: Arguments, at: _At
) -> Odd | None:
    """The first argument that is not that row's."""
    shape = arguments[told].shape
    for name, held in arguments.items():
        theirs = there.get(name)
        if name == told or theirs is None or len(held) != shape[0] or at.row >= len(theirs):
            continue
        if held.shape == shape and theirs.shape == there[told].shape:
            by_place = _by_place(name, held[row], theirs[at.row], at, _counts(arguments, row))
            if by_place is not None:
                which, now, was = by_place
                first = int(which.nonzero()[0])
                return Odd(call=call, row=row, told=told, of=at.row, name=name,
                           others=int(which.sum()), size=len(which), at=first,
                           now=float(now[first]), was=float(was[first]))  # fmt: skip
        elif held.shape[1:] == theirs.shape[1:] and len(theirs) == len(there[told]):
            same = [_same(held[row], other) for other in theirs]
            if not same[at.row]:
                whose = tuple(i for i, is_same in enumerate(same) if is_same)
                return Odd(call=call, row=row, told=told, of=at.row, name=name, whose=whose)
    return None


def _by_place(
    name: str, held: Tensor, theirs: Tensor, at: _At, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """(n,) bool the places of a row that differ, of those that count, and both sides; None where
    none does, or all by the same number, as positions that begin elsewhere."""
    now, was = _overlap(held, theirs, at.start)
    differs = ~torch.isclose(now.double(), was.double(), rtol=CLOSE, atol=0.0)
    if counts is not None and MASK not in name:
        differs &= _overlap(counts, theirs, at.start)[0]
    apart = (now.double() - was.double())[differs]
    alike = len(apart) > 1 and bool((apart == apart[0]).all()) and not bool((~differs).any())
    return (differs, now, was) if bool(differs.any()) and not alike else None


def _counts(arguments: Arguments, row: int) -> Tensor | None:
    """(w,) bool: the places of a row that are no padding, where a mask says it."""
    for name, held in arguments.items():
        if MASK in name and held.dim() == 2:
            return held[row] != 0
    return None


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=CLOSE, atol=0.0)
