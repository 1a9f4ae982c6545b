"""The first operation of a failed step that differs from a run that passed.

Ledgers hold digests of what goes into an operation and of what comes out. Walked side by side with
those of a clean run of the same Program, topology, seed and weights, they show where the two part:
at an operation that is missing, repeated or of another kind, at one rank's input, or between an
operation whose result is right and a later one that did not get it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sumgrad.operations import Operation, number_operations
from sumgrad.outcome import describe_operation, spans
from sumgrad.program_record import ProgramRecord
from sumgrad.verdict import Diagnosis

LOOKED_AT = (  # field of an event, kind of cause where it differs
    ("dtype", "low_precision"),
    ("group", "wrong_group"),
    ("reduce", "avg"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where one rank's ledger first differs from the clean one. what: missing, repeated, a field,
    input, output; now, then: the two operations; before: the last one that is the same."""

    rank: int
    place: int
    what: str
    now: Operation | None
    then: Operation | None
    before: Operation | None


def first_difference(
    record: ProgramRecord, clean: ProgramRecord, tier: str, step: int
) -> Diagnosis | None:
    """A cause from the first parting of the two ledgers; None if they are the same."""
    found = [
        parting
        for rank in sorted(record.ranks)
        if rank in clean.ranks
        for parting in [_part(_operations(record, rank, tier, step),
                              _operations(clean, rank, tier, step), rank)]
        if parting is not None
    ]  # fmt: skip
    if not found:
        return None
    order = {"missing": 0, "repeated": 0, "dtype": 0, "group": 0, "reduce": 0}
    first = min(
        found, key=lambda p: (order.get(p.what, 1), p.place, p.what == "output", p.rank)
    )
    ranks = tuple(p.rank for p in found if (p.what, p.place) == (first.what, first.place))
    return _words(first, ranks, len(record.ranks), step)


def _operations(record: ProgramRecord, rank: int, tier: str, step: int) -> list[Operation]:
    events = record.ranks[rank].events.get((tier, step), [])
    return number_operations(record.spec.topology, rank, events)


def _part(now: Sequence[Operation], then: Sequence[Operation], rank: int) -> Parting | None:
    before: Operation | None = None
    for i in range(max(len(now), len(then))):
        a, b = (ops[i] if i < len(ops) else None for ops in (now, then))
        what = _difference(a, b, now, then, i)
        if what is not None:
            return Parting(rank=rank, place=i, what=what, now=a, then=b, before=before)
        before = a
    return None


def _difference(
    a: Operation | None, b: Operation | None, now: Sequence[Operation], then: Sequence[Operation],
    i: int,
) -> str | None:  # fmt: skip
    if a is None or b is None or _shape(a) != _shape(b):
        if a is not None and len(now) > len(then) and i and _shape(a) == _shape(now[i - 1]):
            return "repeated"
        return "missing" if len(now) <= len(then) else "repeated"
    for key, _ in LOOKED_AT:
        if a.event.get(key) != b.event.get(key):
            return key
    return next((key for key in ("input", "output") if a.event.get(key) != b.event.get(key)), None)


def _shape(operation: Operation) -> tuple[str, Any, Any]:
    return operation.family, operation.event["numel"], operation.event["site"]


def _words(first: Parting, ranks: tuple[int, ...], num_ranks: int, step: int) -> Diagnosis:
    because = [f"until there every operation of rank {spans(ranks)} is that of a run that passed"]
    then = describe_operation(_event(first.then)) or "nothing"
    now = describe_operation(_event(first.now)) or "nothing"
    fields: Mapping[str, str] = dict(LOOKED_AT)
    if first.what == "missing":
        kind, cause = "skipped_collective", f"an operation is missing: {then}"
    elif first.what == "repeated":
        kind, cause = "double_reduction", f"an operation is issued once more: {now}"
    elif first.what in fields:
        kind, cause = fields[first.what], f"{now}; a run that passed has {then}"
    elif first.what == "output":
        kind, cause = "wrong_result", f"the same values go into {now}, and others come out"
    elif len(ranks) == 1 or first.before is None:
        if step:
            kind, cause = "stale_buffer", f"rank {spans(ranks)} puts other values into {now}: step "
            cause += "0 was right, so something is carried over"
        else:
            kind, cause = "changed_input", f"rank {spans(ranks)} puts other values into {now}"
    else:
        before = describe_operation(_event(first.before))
        kind = "unused_result"
        cause = (
            f"the result of {before} is right and does not reach what follows: it is not used, "
            f"or read too early"
        )
        because.append(f"the next operation gets other values: {now}")
    return Diagnosis(cause=cause, kind=kind, ranks=ranks, because=tuple(because))


def _event(operation: Operation | None) -> Mapping[str, Any] | None:
    return operation.event if operation is not None else None
