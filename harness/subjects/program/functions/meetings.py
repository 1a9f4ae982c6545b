"""Which calls of Functions ranks can run once more together: whose operations meet each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sumgrad.ledger.operations import members
from sumgrad.subjects.program.functions.applied import Applied

MOST_CALLS = 2  # of one line
MOST_OF_A_FUNCTION = 6
MOST_IN_ALL = 24

Key = tuple[str, str, str, int]  # of a call: its Function, its line, and which of it
Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """With whom a rank's call communicates.

    peers: ranks, in its forward or its backward. together: how often in its forward with all of a
    group; to, of: how many messages it sends another rank there, and receives.
    """

    peers: frozenset[int]
    together: Mapping[Ranks, int]
    to: Mapping[int, int]
    of: Mapping[int, int]


class Meetings:
    """One rank's calls, and whom each of them meets; those that meet nobody are left out."""

    def __init__(
        self, calls: Iterable[Applied], events: Iterable[Mapping[str, Any]], rank: int
    ) -> None:
        known = {int(event["n"]): event for event in events if "op" in event}
        self.calls: dict[Key, Applied] = {}
        self.met: dict[Key, Met] = {}
        for one in calls:
            forward = [known[n] for n in range(*one.operations) if n in known]
            back = [known[n] for n in range(one.began, one.ended) if n in known]
            if forward or back:
                key = (one.cls.__name__, *one.line, one.number)
                self.calls[key] = one
                self.met[key] = _met(forward, back)


def _met(forward: Sequence[Mapping[str, Any]], back: Sequence[Mapping[str, Any]]) -> Met:
    alone = [event for event in forward if event.get("peer") is not None]
    return Met(
        peers=frozenset(rank for event in (*forward, *back) for rank in _peers(event)),
        together=Counter(members(event) for event in forward if event.get("peer") is None),
        to=Counter(event["peer"] for event in alone if event["op"] == "send"),
        of=Counter(event["peer"] for event in alone if event["op"] != "send"),
    )


def _peers(event: Mapping[str, Any]) -> Ranks:
    return members(event) if event.get("peer") is None else (int(event["peer"]),)


def shared_calls(met: Sequence[Mapping[Key, Met]]) -> list[tuple[Key, list[Ranks]]]:
    """By rank whom its calls meet -> the calls that groups of ranks run together; some of each line
    and Function."""
    of_line: Counter[tuple[str, ...]] = Counter()
    of_function: Counter[str] = Counter()
    found: list[tuple[Key, list[Ranks]]] = []
    for key in sorted({key for own in met for key in own}, key=lambda k: (k[3], k)):
        groups = _groups({rank: own[key] for rank, own in enumerate(met) if key in own})
        few = of_line[key[:3]] < MOST_CALLS and of_function[key[0]] < MOST_OF_A_FUNCTION
        if groups and few and len(found) < MOST_IN_ALL:
            of_line[key[:3]] += 1
            of_function[key[0]] += 1
            found.append((key, groups))
    return found


def _groups(met: Mapping[int, Met]) -> list[Ranks]:
    """Ranks that meet each other, and nobody else, as often as they are met."""
    left, groups = {*met}, list[Ranks]()
    while left:
        group, new = set[int](), {min(left)}
        while new:
            group |= new
            mine = {rank for r in new if r in met for rank in met[r].peers}
            others = {rank for rank in left if not met[rank].peers.isdisjoint(group)}
            new = (mine | others) - group
        left -= group
        if len(group) > 1 and group <= {*met} and _meet({rank: met[rank] for rank in group}):
            groups.append(tuple(sorted(group)))
    return groups


def _meet(met: Mapping[int, Met]) -> bool:
    for rank, own in met.items():
        if any(met[r].together.get(g, 0) != n for g, n in own.together.items() for r in g):
            return False
        if any(met[other].of.get(rank, 0) != n for other, n in own.to.items()):
            return False
        if any(met[other].to.get(rank, 0) != n for other, n in own.of.items()):
            return False
    return True
