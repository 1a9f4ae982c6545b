"""The last operations of every rank, side by side, as its ledger has them: data for a picture.

Nothing says when an operation ran. A collective stands in one column on all its members, to the
right of everything that one of them issued before it; so a rank that came less far is seen, and so
is one that does something else than its peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sumgrad.base.outcome import describe_operation
from sumgrad.ledger.operations import FAMILIES, POINT_TO_POINT, members, signature
from sumgrad.plan.schedule import Mismatch
from sumgrad.record.directory import Record

MOST_COLUMNS, MOST_RANKS = 32, 24
LAST = 4 * MOST_COLUMNS  # of a rank's operations; what came before them is not looked at
# done; open: begun and not done; unlike: its members issue something else at this place;
# unplanned: the plan has something else there.
State = Literal["done", "open", "unlike", "unplanned"]
Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """An operation of one rank. column: its place from the left; family: as FAMILIES has it."""

    column: int
    family: str
    state: State
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """rows: rank -> its operations. left_out: columns before these, about so many, and ranks,
    that are not in it."""

    rows: dict[int, tuple[Issued, ...]]
    columns: int
    columns_left_out: int
    ranks_left_out: int

    def to_json(self) -> dict[str, Any]:
        """As verdict.json has it: an operation is [column, family, state, number of its text]."""
        texts = list(dict.fromkeys(i.says for row in self.rows.values() for i in row))
        number = {text: n for n, text in enumerate(texts)}
        return {
            "columns": self.columns,
            "columns_left_out": self.columns_left_out,
            "ranks_left_out": self.ranks_left_out,
            "texts": texts,
            "rows": {
                str(rank): [[i.column, i.family, i.state, number[i.says]] for i in row]
                for rank, row in self.rows.items()
            },
        }


def timeline(record: Record, mismatches: Sequence[Mismatch] = ()) -> Timeline | None:
    """Of a run whose ranks wrote ledgers; those that did not end well are in it in any case.

    mismatches: where the ledgers differ from the plan.
    """
    unplanned = {(m.rank, m.number) for m in mismatches}
    started = {rank: [e for e in lines if "op" in e] for rank, lines in record.started.items()}
    if not any(started.values()):
        return None
    done = {
        rank: {line["done"] for line in lines if "done" in line}
        for rank, lines in record.started.items()
    }
    keys = {rank: list(_keys(events))[-LAST:] for rank, events in started.items()}
    before = max(len(events) for events in started.values()) - LAST
    started = {rank: events[-LAST:] for rank, events in started.items()}
    columns, unlike = _columns(keys), set(_unlike(started, keys))
    last = 1 + max((max(own) for own in columns.values() if own), default=0)
    first = max(0, last - MOST_COLUMNS)
    bad = {o.rank for o in record.outcomes if not o.ok}
    shown = sorted(sorted(started, key=lambda r: (r not in bad, r))[:MOST_RANKS])

    def issued(rank: int) -> Iterator[Issued]:
        for event, column in zip(started[rank], columns[rank], strict=True):
            if column < first:
                continue
            ended = event["n"] in done[rank] or rank not in bad  # the last end is often not written
            state: State = "done" if ended else "open"
            if (rank, event["n"]) in unlike:
                state = "unlike"
            elif (rank, event["n"]) in unplanned:
                state = "unplanned"
            yield Issued(
                column=column - first,
                family=str(FAMILIES.get(event["op"], event["op"])),
                state=state,
                says=str(describe_operation(event)),
            )

    return Timeline(
        rows={rank: tuple(issued(rank)) for rank in shown},
        columns=last - first,
        columns_left_out=first + max(0, before),
        ranks_left_out=len(started) - len(shown),
    )


Key = tuple[str, tuple[int, ...], int]  # of a collective: its group and its place in it


def _columns(keys: Mapping[int, Sequence[Key | None]]) -> dict[int, list[int]]:
    """Each rank's columns."""
    waiting: dict[Key, set[int]] = {}
    for rank, own in keys.items():
        for key in own:
            if key is not None:
                waiting.setdefault(key, set()).add(rank)
    columns: dict[int, list[int]] = {rank: [] for rank in keys}

    def head(rank: int) -> Key | None:
        return keys[rank][len(columns[rank])]

    def end(rank: int) -> int:
        return columns[rank][-1] + 1 if columns[rank] else 0

    left = {rank for rank, own in keys.items() if own}
    while left:
        alone = {rank for rank in left if head(rank) is None}
        ready = [k for r in left - alone if (k := head(r)) is not None
                 and all(m in left and head(m) == k for m in waiting[k])]  # fmt: skip
        for rank in alone:
            columns[rank].append(end(rank))
        if ready or not alone:  # where none is: they issue them in unlike order
            key = ready[0] if ready else head(min(left))
            mine = [rank for rank in left - alone if head(rank) == key]
            place = max(end(rank) for rank in mine)
            for rank in mine:
                columns[rank].append(place)
        left = {rank for rank in left if len(columns[rank]) < len(keys[rank])}
    return columns


def _keys(events: Sequence[Event]) -> Iterator[Key | None]:
    """None for a message: it stands where its rank issues it."""
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    for event in events:
        if FAMILIES.get(event["op"]) in POINT_TO_POINT:
            yield None
            continue
        group = (str(event.get("pg", "")), members(event))
        yield (*group, counts.get(group, 0))
        counts[group] = counts.get(group, 0) + 1


def _unlike(
    started: Mapping[int, Sequence[Event]], keys: Mapping[int, Sequence[Key | None]]
) -> Iterator[tuple[int, int]]:
    """(rank, number) of the operations that its peers do not issue so."""
    found: dict[Key, dict[int, Event]] = {}
    for rank, events in started.items():
        for event, key in zip(events, keys[rank], strict=True):
            if key is not None:
                found.setdefault(key, {})[rank] = event
    for held in found.values():
        if len({signature(event) for event in held.values()}) > 1:
            yield from ((rank, event["n"]) for rank, event in held.items())
