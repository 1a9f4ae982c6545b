"""Which modules' outputs others are made from: the ways to the loss, and back down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sumgrad.record.trace import LOSS


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """below: module -> those whose outputs its own is made from; above: -> those made from it, or
    LOSS. In both those next to it, with no other module in between. known: those with a graph."""

    below: Mapping[str, tuple[str, ...]]
    above: Mapping[str, tuple[str, ...]]
    known: frozenset[str] = frozenset()

    def next_above(self, module: str, told: Callable[[str], bool]) -> tuple[str, ...]:
        """The nearest on every way to the loss that are told of, and LOSS where none is on one."""
        return _nearest(self.above, module, lambda m: m == LOSS or told(m))

    def next_below(self, module: str, told: Callable[[str], bool]) -> tuple[str, ...]:
        """The nearest that it is made from of those that are told of."""
        return _nearest(self.below, module, told)

    def all_above(self, module: str) -> set[str]:
        return set(_nearest(self.above, module, lambda _: False, passed=True))

    def all_below(self, module: str) -> set[str]:
        return set(_nearest(self.below, module, lambda _: False, passed=True))


def _nearest(
    following: Mapping[str, tuple[str, ...]],
    module: str,
    told: Callable[[str], bool],
    *,
    passed: bool = False,
) -> tuple[str, ...]:
    """Where every way from a module first meets one that is told of. passed: all on the way too."""
    found: dict[str, None] = {}
    todo, seen = list(following.get(module, ())), {module}
    while todo:
        at = todo.pop(0)
        if at in seen:
            continue
        seen.add(at)
        stops = told(at)
        if stops or passed:
            found[at] = None
        if not stops:
            todo += following.get(at, ())
    return tuple(found)


def paths_of(modules: Sequence[str], takes: Mapping[str, Sequence[str]]) -> Paths:
    """Of modules in the order of their outputs. takes: as in Trace; one that is not in it, because
    a checkpoint or a frozen part keeps no graph, is taken to follow the one before it."""
    known = set(takes) | {other for others in takes.values() for other in others}
    below: dict[str, list[str]] = {
        m: [other for other in takes.get(m, ()) if other in modules] for m in (*modules, LOSS)
    }
    for before, module in zip(modules, (*modules[1:], LOSS), strict=True):
        if before not in known or module not in known:
            below[module].append(before)
    above: dict[str, list[str]] = {}
    for module, others in below.items():
        for other in others:
            above.setdefault(other, []).append(module)
    return Paths(
        below={m: tuple(dict.fromkeys(others)) for m, others in below.items()},
        above={m: tuple(dict.fromkeys(others)) for m, others in above.items()},
        known=frozenset(known),
    )
