"""Where a tensor that came from another rank was made there, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.missing_sum import gradient_of_kept
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code
from sumgrad.diagnose.modules.how_wrong.missing_sum import whole_but_for
from sumgrad.diagnose.modules.in_code.made_by import SHAPING
from sumgrad.diagnose.modules.values.matching import match, vectors
from sumgrad.diagnose.names import axis_groups
from sumgrad.record.computed import Computation
from sumgrad.record.line import Line
from sumgrad.record.trace import Traces
from torch import Tensor

FEWEST = 2  # different numbers that are no chance
MOST_PASSED, MOST_BROUGHT = 32, 2  # values on the way back, and senders that are told
JOINS = {"cat", "stack", "concat", "concatenate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """A rank's computation, number `place`, that gives what another rank was sent."""

    rank: int
    place: int
    made: Computation

    def in_words(self) -> str:
        return f"rank {self.rank} at {expression(self.made)}"


@as_a_hint
def made_on_another_rank(traces: Traces, rank: int, value: Tensor | None) -> list[str]:
    """The first line of another rank that gives just these numbers in this order; of what was put
    together here, of each part."""
    if value is None:
        return []
    whole, parts = _makers_elsewhere(traces, rank, value)
    if whole:
        return [f"its numbers on rank {rank} come from {whole[0].in_words()}"]
    return [f"of its numbers on rank {rank} a part comes from {text}"
            for text in dict.fromkeys(maker.in_words() for maker in parts)]  # fmt: skip


@as_a_hint
def brought_into(traces: Traces, rank: int, line: Line) -> list[str]:
    """Of what a line puts together, and what lines before it only cut, shaped or joined: which
    other ranks' lines made it."""
    computed = traces.ranks[rank].computed
    makers = {n: c for c in reversed(computed.computations) for n in c.gives}
    here = (c.uses for c in computed.computations if (c.line, c.code) == line)
    todo = next((uses for uses in here if len(uses) > 1), [])
    passed, found = {*todo}, dict[str, None]()
    while todo and len(passed) <= MOST_PASSED:
        number = todo.pop(0)
        maker = makers.get(number)
        if maker is not None and maker.function in SHAPING | JOINS:
            before = [n for n in maker.uses if n not in passed]
            passed.update(before)
            todo += before
        elif maker is None or maker.written:
            first = next(_makers(traces, rank, computed.values[number]), None)
            found |= {} if first is None else {first.in_words(): None}
    return [f"of what is put together there on rank {rank} a part comes from {text}"
            for text in [*found][:MOST_BROUGHT]]  # fmt: skip


@as_a_hint
def right_as_a_sum(
    case: Case, rank: int, value: Tensor | None, wanted: Tensor, tolerance: float
) -> list[str]:
    """Where what another rank cut it from is a part, and the sum of these over an axis is right.
    wanted: (N, C) the vectors of the right gradient."""
    traces = case.traces
    if traces is None or value is None:
        return []
    whole, parts = _makers_elsewhere(traces, rank, value)
    for maker in (whole or parts)[:1]:
        own = _taken(traces, maker)
        if own is None or _are_all_there(own, wanted, tolerance):
            continue
        for axis, groups in axis_groups(case):
            group = next((g for g in groups if maker.rank in g and len(g) > 1), ())
            terms = [_taken(traces, other) for other in _at_the_same_place(traces, maker, group)]
            alike = [t for t in terms if t is not None and t.shape == own.shape]
            if not group or len(alike) != len(group):
                continue
            line = line_and_code(maker.made.line, maker.made.code)
            start = f"what {line} takes on rank {spans(list(group))} is a part on each"
            end = "look for a sum that is missing before it is sent"
            if _are_all_there(torch.stack(alike).sum(0), wanted, tolerance):
                return [f"{start}, and their sum over {axis} is right: {end}"]

            def is_right(total: Tensor) -> bool:
                return _are_all_there(total, wanted, tolerance)

            kept = whole_but_for(traces, group, alike, is_right)
            if kept is not None:
                return [f"{start}, and their sum over {axis} is right, with "
                        f"{gradient_of_kept(case, kept)}, which each of them has whole, counted "
                        f"once: {end}"]  # fmt: skip
    return []


def _makers_elsewhere(traces: Traces, rank: int, value: Tensor) -> tuple[list[Maker], list[Maker]]:
    """The computations of other ranks that give all of a rank's tensor; and, where it was put
    together, the first that gives each part."""
    own = traces.ranks[rank].computed
    joined = [c for c in own.computations if c.function in JOINS and _gives(own.values, c, value)]
    parts = [own.values[n] for c in joined[:1] for n in c.takes if isinstance(n, int)]
    firsts = [maker for part in parts for maker in [*_makers(traces, rank, part)][:1]]
    return [*_makers(traces, rank, value)], firsts


def _taken(traces: Traces, maker: Maker) -> Tensor | None:
    """The first tensor that it takes."""
    numbers = [n for n in maker.made.takes if isinstance(n, int)]
    return traces.ranks[maker.rank].computed.values[numbers[0]].double() if numbers else None


def _are_all_there(value: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if not value.dim() or value.shape[-1] > wanted.shape[1]:
        return False
    where = match(vectors(value), wanted, tolerance)
    return where is not None and bool(where.found.any(1).all())


def _at_the_same_place(traces: Traces, maker: Maker, ranks: Sequence[int]) -> Iterator[Maker]:
    """On each rank the computation at the same place in the code, the same one of several."""
    before = traces.ranks[maker.rank].computed.computations[: maker.place]
    number = sum(c.site == maker.made.site for c in before)
    for rank in ranks:
        every = enumerate(traces.ranks[rank].computed.computations)
        same = [Maker(rank=rank, place=i, made=c) for i, c in every if c.site == maker.made.site]
        yield from same[number : number + 1]


def _makers(traces: Traces, rank: int, value: Tensor) -> Iterator[Maker]:
    """On other ranks, at lines that do not give it here."""
    own = traces.ranks[rank].computed
    here = {c.site for c in own.computations if _gives(own.values, c, value)}
    for other, trace in traces.ranks.items():
        for i, c in enumerate(trace.computed.computations if other != rank else ()):
            if c.site not in here and _gives(trace.computed.values, c, value):
                yield Maker(rank=other, place=i, made=c)


def _gives(values: tuple[Tensor, ...], c: Computation, value: Tensor) -> bool:
    flat = value.reshape(-1)
    return len(flat.unique()) >= FEWEST and any(
        values[n].numel() == flat.numel() and torch.equal(values[n].reshape(-1), flat)
        for n in c.gives
    )
