"""Lines of the forward that are not what they were when the backward runs them again.

A checkpoint runs the forward once more, of what it kept. A line that gives something else of the
same arguments then, or takes what was changed in place since, makes the gradients of another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.record.computed import Change, Computation, Computed, same_value
from torch import Tensor

SAME = 1e-6  # of the largest element: what a second computation may round otherwise
MOST_CHANGES = 8  # in place, one after the other
MOST_TRIED = 64  # calls of one line in the forward


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAgain:
    """again: a call in the backward, at: the how manieth there; first: that of the forward which it
    is held against.

    argument: which of what it takes is another, -1 where what it gives is. changes: what made that
    of what it was in the forward, in place and in order; empty where that is not seen.
    """

    again: Computation
    at: int
    first: Computation
    argument: int
    changes: tuple[Change, ...]


def run_otherwise(computed: Computed) -> Iterator[RunAgain]:
    """In the order of the backward. Of one line's calls those that are like none in the forward,
    and that are proved to be its own: of the same arguments, or of one changed in place."""
    first: dict[tuple[str, str], list[Computation]] = {}
    for c in computed.computations:
        first.setdefault(_key(c), []).append(c)
    for at, again in enumerate(computed.again):
        if "empty" in again.function:  # gives what was there
            continue
        tried = [
            c for c in first.get(_key(again), ())[:MOST_TRIED]
            if len(c.takes) == len(again.takes) and len(c.gives) == len(again.gives)
        ]  # fmt: skip
        if any(not _others(computed, c, again) and _gives_same(computed, c, again) for c in tried):
            continue
        yield from _told(computed, tried, at)


def _key(c: Computation) -> tuple[str, str]:
    return c.function, c.site


def _told(computed: Computed, tried: Sequence[Computation], at: int) -> Iterator[RunAgain]:
    again = computed.again[at]
    for c in tried:
        others = _others(computed, c, again)
        if len(others) > 1:
            continue
        argument = others[0] if others else -1
        pairs = [(c.takes[argument], again.takes[argument])] if others else [
            pair for pair in zip(c.gives, again.gives, strict=True)
            if not _is_same(computed, *pair)
        ]  # fmt: skip
        was, now = pairs[0]
        changes = () if isinstance(was, str) or isinstance(now, str) else (
            _changed_to(computed, was, computed.values_again[now])
        )  # fmt: skip
        if changes or not others:
            yield RunAgain(again=again, at=at, first=c, argument=argument, changes=changes)
            return


def _others(computed: Computed, first: Computation, again: Computation) -> list[int]:
    """Which arguments are not the same."""
    return [
        k
        for k, (a, b) in enumerate(zip(first.takes, again.takes, strict=True))
        if not _is_same(computed, a, b)
    ]


def _gives_same(computed: Computed, first: Computation, again: Computation) -> bool:
    return all(_is_same(computed, a, b) for a, b in zip(first.gives, again.gives, strict=True))


def _is_same(computed: Computed, first: int | str, again: int | str) -> bool:
    if isinstance(first, str) or isinstance(again, str):
        return first == again  # no tensor; one that is too large to be kept is like no other
    return close(computed.values[first], computed.values_again[again])


def _changed_to(computed: Computed, was: int, now: Tensor) -> tuple[Change, ...]:
    """The changes in place that make of one value the other, the fewest; none where none do."""
    ways: list[tuple[Tensor, tuple[Change, ...]]] = [(computed.values[was], ())]
    for _ in range(MOST_CHANGES):
        longer = []
        for value, way in ways:
            for change in computed.changes:
                if change in way or not same_value(computed.values[change.before], value):
                    continue
                after = computed.values[change.after]
                if same_value(after, now):
                    return (*way, change)
                longer.append((after, (*way, change)))
        ways = longer[:MOST_CHANGES]
    return ()


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two values are the same but for rounding."""
    if a.shape != b.shape:
        return False
    if a.dtype != b.dtype or not a.is_floating_point() or not a.numel():
        return same_value(a, b)
    off, size = (a.double() - b.double()).abs().max(), a.double().abs().max()
    return same_value(a, b) or float(off) <= SAME * float(size)
