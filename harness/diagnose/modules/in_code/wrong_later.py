"""A line that gives what is right when it runs first, and no more when it runs again.

As of a loop of which a later turn takes what an earlier one should have left otherwise. What the
line takes may be a part on each rank, which no value tells, as long as it is so in its right turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.values.seen import State
from sumgrad.record.computed import MODULE, Computation


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongLater:
    """On a rank a computation of a line that runs `times` times: right before, and not from its
    turn `since` on, counted from 0. place: of that turn among all that the rank computes."""

    rank: int
    mine: Computation
    place: int
    since: int
    times: int


def wrong_later(lines: Lines, rank: int) -> Iterator[WrongLater]:
    """In the order in which they go wrong; none that takes something that goes wrong then."""
    turns: dict[tuple[str, str], list[tuple[int, Computation]]] = {}
    for place, c in enumerate(lines.computed(rank).computations):
        if c.line and c.gives and not c.function.startswith(MODULE) and not c.function_of:
            turns.setdefault((c.site, c.function), []).append((place, c))
    found = []
    for held in turns.values():
        states = [_given(lines, rank, c) for _, c in held]
        since = next((i for i, state in enumerate(states) if state != "right"), len(held))
        if not since or {*states[since:]} != {"wrong"}:
            continue
        if any(lines.moves(rank, c) for _, c in held[:since]):
            continue  # that it gives what it takes says nothing of what it does
        before = [_taken(lines, rank, c) for _, c in held[:since]]
        place, mine = held[since]
        if _taken(lines, rank, mine) in before:
            found.append(
                WrongLater(rank=rank, mine=mine, place=place, since=since, times=len(held))
            )
    yield from sorted(found, key=lambda one: one.place)


def _given(lines: Lines, rank: int, c: Computation) -> State:
    """Of all that it gives together."""
    states = {lines.states.forward(rank, n) for n in c.gives}
    return states.pop() if len(states) == 1 else "untold"


def _taken(lines: Lines, rank: int, c: Computation) -> list[State]:
    """Of each of its arguments."""
    return [lines.states.forward(rank, t) if isinstance(t, int) else "untold" for t in c.takes]
