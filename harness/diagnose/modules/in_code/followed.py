"""From one value to another, by the computations that give and take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sumgrad.base.files import is_librarys
from sumgrad.record.computed import MODULE, Computation, Computed

MOST_FOLLOWED = 5000  # computations on the way from one value


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """By number of a value: the computations that give it, and that take its numbers."""

    gives: dict[int, list[int]] = field(default_factory=dict)
    takes: dict[int, list[int]] = field(default_factory=dict)


def followed(
    numbers: Sequence[int], ways: dict[int, list[int]], next_ones: Callable[[int], Sequence[int]]
) -> Iterator[int]:
    """All values that computations lead to from these, one after the other."""
    todo, seen, passed = [*numbers], {*numbers}, set[int]()
    while todo and len(passed) <= MOST_FOLLOWED:
        for place in ways.get(todo.pop(0), ()):
            if place in passed:
                continue
            passed.add(place)
            for number in next_ones(place):
                if number not in seen:
                    seen.add(number)
                    todo.append(number)
                    yield number


def is_users(c: Computation) -> bool:
    """Whether a line of the user's own made the call: no library's, no module's, and not inside of
    a Function."""
    own = bool(c.site) and not c.function_of and not is_librarys(c.line)
    return own and not c.function.startswith(MODULE)


def ways_of(computed: Computed) -> Ways:
    ways = Ways()
    for place, c in enumerate(computed.computations):
        for number in c.gives:
            ways.gives.setdefault(number, []).append(place)
        for used in c.uses:
            ways.takes.setdefault(used, []).append(place)
    return ways
