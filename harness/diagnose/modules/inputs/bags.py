"""Bags of whole numbers, a flat list with the places where each begins, that end elsewhere than in
the single process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sumgrad.record.line import Line
from sumgrad.record.trace import Trace

MOST_NUMBERS = 1 << 14  # of one process
Bag = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBag:
    """Bag `bag` of `of` that a module is handed in a call has `size` numbers, and one of the single
    process's begins with the same, or is what this begins with, and has `theirs`."""

    call: int
    bag: int
    of: int
    size: int
    theirs: int
    made: Line


def other_bags(mine: Trace, whole: Trace, module: str) -> Iterator[OtherBag]:
    """In the order of the rank; of bags that are no bag of the single process's."""
    there = {bag for _, bags, _ in _handed(whole, module) for bag in bags if bag}
    for call, bags, made in _handed(mine, module):
        for i, bag in enumerate(bags):
            if not bag or bag in there:
                continue
            alike = [b for b in there if bag[: len(b)] == b or b[: len(bag)] == bag]
            if alike:
                theirs = len(max(alike, key=len))
                yield OtherBag(call=call, bag=i, of=len(bags), size=len(bag), theirs=theirs,
                               made=made)  # fmt: skip


def _handed(trace: Trace, module: str) -> Iterator[tuple[int, list[Bag], Line]]:
    """Of each call with a flat `input` and its `offsets`: its bags, and the line that made it."""
    lines = trace.entered_at or (("", ""),) * len(trace.data)
    held = {
        as_: (data.tolist(), line)
        for data, of, as_, line in zip(
            trace.data, trace.entered, trace.entered_as, lines, strict=False
        )
        if of == module and data.dim() == 1 and not data.is_floating_point()
        and data.numel() <= MOST_NUMBERS
    }  # fmt: skip
    for (call, name), (numbers, line) in held.items():
        offsets = held.get((call, "offsets"))
        if name == "input" and offsets is not None:
            ends = [*offsets[0][1:], len(numbers)]
            bags = zip(offsets[0], ends, strict=True)
            yield call, [tuple(numbers[start:end]) for start, end in bags], line
