"""One vector of each row, as a classifier reads it: taken at another place than in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import TOLERANCES, Seen
from sumgrad.diagnose.modules.values.whole import Whole, by_module, vectors_a_row
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import Traces
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """Row `row` of a call's output, which is what `module` gives that row at the first place of
    `places`; the second is the one that the single process takes. of: places that rows have, here
    and there."""

    rank: int
    call: int
    row: int
    module: str
    places: tuple[int, int]
    of: tuple[int, int]


def picked_otherwise(
    traces: Traces, look: Look, seen: Sequence[Seen], modules: Sequence[str]
) -> Iterator[Picked]:
    """Of wrong outputs (rows, C), rows that stand at one place each of what one of these modules,
    which is right, gives in the same call (rows, places, C)."""
    asked = {s.call.module for s in seen}
    whole = by_module(traces.single, {*modules, *asked}.__contains__)
    for s in (s for s in seen if len(s.shape) == 2 and s.wrong is not None):
        for module in modules:
            held = [m for m in look.seen[module] if _is_source(m, s)]
            out, there = whole.get((s.call.module, s.call.part)), whole.get((module, 0))
            if len(held) == 1 and out is not None and there is not None:
                yield from _of_call(traces, s, held[0], out, there)


def _is_source(m: Seen, s: Seen) -> bool:
    rows, width = s.shape
    return (
        (m.rank, m.call.number, m.call.part) == (s.rank, s.call.number, 0)
        and not m.call.recomputed
        and len(m.shape) == 3
        and (m.shape[0], m.shape[2]) == (rows, width)
    )


def _of_call(traces: Traces, s: Seen, m: Seen, out: Whole, there: Whole) -> Iterator[Picked]:
    if out.rows is None or there.rows is None or m.where is None or m.rows is None:
        return
    theirs, each = vectors_a_row(there.rows), m.shape[1]
    if vectors_a_row(out.rows) != 1 or not theirs or s.wrong is None:
        return
    trace = traces.ranks[s.rank]
    got = vectors(trace.output_of(s.call))
    source = vectors(trace.outputs[trace.calls.index(m.call)]).reshape(-1, each, got.shape[1])
    for i in s.wrong.tolist():
        told = m.rows[m.where.picked // each == i].unique().tolist()
        if len(told) != 1 or told[0] < 0:
            continue
        row = told[0]
        place = _place(got[i], source[i])
        wanted = _place(out.outputs[row], there.outputs[row * theirs : (row + 1) * theirs])
        if place is not None and wanted is not None:
            yield Picked(rank=s.rank, call=s.call.number, row=i, module=m.call.module,
                         places=(place, wanted), of=(each, theirs))  # fmt: skip


def _place(vector: Tensor, among: Tensor) -> int | None:
    """The one of (n, C) that a vector is."""
    bound = TOLERANCES["float64"] * float(among.abs().max())
    found = ((among - vector).abs().amax(1) <= bound).nonzero()[:, 0].tolist()
    return found[0] if len(found) == 1 else None
