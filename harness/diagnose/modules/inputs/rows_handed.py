"""What a module is handed beside its rows, that differs for just the rows that come out wrong.

A mask, positions, lengths: a number, or some, for each row. Which row of the batch a rank's row is,
is known by what is right of it in the same call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sumgrad.diagnose.modules.inputs.entered import is_stretch
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.line import Line
from sumgrad.record.trace import INTO, Trace, Traces
from torch import Tensor

Place = tuple[int, int, int]  # a rank, a call of it, a row there


@dataclass(frozen=True, slots=True, kw_only=True)
class Handed:
    """What `module` is handed as `name`: another than in the single process at these places, which
    come out wrong, and at none that comes out right. made: the line that made it."""

    module: str
    name: str
    places: tuple[Place, ...]
    made: Line


def wrong_and_right_rows(look: Look, found: FirstWrong) -> tuple[set[Place], set[Place]]:
    """The rows of calls of what is wrong that have a wrong vector, and those that have none."""
    wrong: set[Place] = set()
    right: set[Place] = set()
    for s in look.seen[found.wrong]:
        if s.call.recomputed or s.call.part or not s.shape:
            continue
        rows = range(s.shape[0] if len(s.shape) > 1 else 1)
        here = {(s.rank, s.call.number, row) for row in rows}
        if s.forward == "right" and s.in_order:
            right |= here
        elif s.forward == "wrong" and s.wrong is not None:
            each = max(1, math.prod(s.shape[:-1]) // len(rows))
            odd = {(s.rank, s.call.number, int(i) // each) for i in s.wrong}
            wrong |= odd
            right |= here - odd
    return wrong, right - wrong


def as_often(trace: Trace, module: str, other: str) -> bool:
    """Whether a rank calls both as often, so that their calls go together by number."""
    often = [
        len({c.number for c in trace.calls
             if c.module.removeprefix(INTO) == name and not c.recomputed})
        for name in (module, other)
    ]  # fmt: skip
    return module == other or often[0] == often[1]


def handed_for_wrong_rows(
    traces: Traces, look: Look, found: FirstWrong, modules: Sequence[str]
) -> Handed | None:
    """Of these modules the first that is handed something so."""
    wrong, right = wrong_and_right_rows(look, found)
    rows = _rows_of_batch(look)
    for module in modules:
        there = _handed(traces.single, module)
        here = {rank: _handed(trace, module) for rank, trace in traces.ranks.items()}
        if not all(as_often(trace, module, found.wrong) for trace in traces.ranks.values()):
            continue
        for name, calls in there.items():
            whole = [row for data, _ in calls.values() for row in data]
            told = {
                place: _is_there(own[name][place[1]][0], place[2], rows[place], whole)
                for place in (*sorted(wrong), *sorted(right))
                if place in rows and name in (own := here[place[0]]) and place[1] in own[name]
            }
            told = {place: same for place, same in told.items() if same is not None}
            odd = {place for place, same in told.items() if not same}
            if odd and odd <= wrong and {*told} >= wrong and {*told} & right:
                rank, call, _ = first = min(odd)
                return Handed(
                    module=module, name=name, places=(first, *sorted(odd - {first})),
                    made=here[rank][name][call][1],
                )  # fmt: skip
    return None


def _handed(trace: Trace, module: str) -> Mapping[str, Mapping[int, tuple[Tensor, Line]]]:
    """By argument and call, what it is handed and the line that made it; without arguments that
    have no name, and those that are several tensors."""
    out: dict[str, dict[int, tuple[Tensor, Line]]] = {}
    several: set[str] = set()
    for of, (call, name), made, data in zip(
        trace.entered, trace.entered_as, trace.entered_at, trace.data, strict=False
    ):
        if of == module and name:
            several |= {name} if call in out.get(name, {}) else set()
            out.setdefault(name, {})[call] = data, made
    return {name: calls for name, calls in out.items() if name not in several}


def _rows_of_batch(look: Look) -> dict[Place, int]:
    """Which row of the batch each row of a call is, where modules that are right say the same."""
    said: dict[Place, set[int]] = {}
    for module in look.modules:
        for s in look.seen[module]:
            for place, row in _rows_of(s):
                said.setdefault(place, set()).add(row)
    return {place: rows.pop() for place, rows in said.items() if len(rows) == 1}


def _rows_of(s: Seen) -> list[tuple[Place, int]]:
    if s.forward != "right" or s.rows is None or s.where is None or len(s.shape) < 2:
        return []
    each = max(1, math.prod(s.shape[:-1]) // s.shape[0])
    found = []
    for row in range(s.shape[0]):
        told = s.rows[s.where.picked // each == row].unique().tolist()
        if len(told) == 1 and told[0] >= 0:
            found.append(((s.rank, s.call.number, row), int(told[0])))
    return found


def _is_there(data: Tensor, row: int, of: int, whole: Sequence[Tensor]) -> bool | None:
    """Whether a row of what is handed is that of the single process, or a stretch of it; None where
    that cannot be told."""
    if not data.dim() or row >= len(data) or of >= len(whole):
        return None
    mine, its = data[row].reshape(-1), whole[of].reshape(-1)
    return is_stretch(mine.to(its), its) if mine.numel() and its.numel() else None
