"""What a wrong gradient lacks, and that reached a copy: a leaf with the same numbers.

A pipeline, or a step that cuts its graph in pieces, gives a copy of an output to what comes next,
and hands back by hand the gradient that reaches it. Where the gradient that a module's output ends
with is the single process's less what some of these backwards left at a copy, that was not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.trace import Traces
from torch import Tensor

CLOSE = 1e-12  # of a number: those of a copy are the same
ONCE = 1e-6
LEFT = 1e-9  # of the largest number, that the sum may leave
FEWEST = 6  # numbers of an output
MOST_ARRIVALS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """`backwards` of the `of` backwards that reached a copy on `rank` are missing in a gradient.
    taken: the first line, or module, that takes the copy; made: where it was made, and the code
    there, or two empty ones."""

    rank: int
    taken: Computation
    made: tuple[str, str]
    backwards: int
    of: int


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    """A gradient that reached a copy, where the output has the copy's numbers; zero elsewhere."""

    rank: int
    number: int
    gradient: Tensor


def lost_at_copies(
    traces: Traces, found: Sequence[Seen], factor: float = 1.0
) -> tuple[Seen, list[Lost]] | None:
    """The first wrong tensor that it explains. factor: that right gradients have there."""
    for s in found:
        lacks = _lacks(traces, s, factor)
        lost = [] if lacks is None else lost_of(traces, *lacks)
        if lost:
            return s, lost
    return None


def _lacks(traces: Traces, s: Seen, factor: float) -> tuple[Tensor, Tensor] | None:
    """(n,) the numbers of an output, and what their gradients lack."""
    trace, whole = traces.ranks[s.rank], by_module(traces.single, s.call.module.__eq__)
    at, wanted = trace.calls.index(s.call), whole.get((s.call.module, s.call.part))
    output, got = trace.outputs[at], trace.gradients[at]
    if wanted is None or s.where is None or output.dtype != torch.float64:
        return None
    told = s.where.found.sum(1) == 1
    start, end = s.where.columns
    picked = s.where.picked[told]
    right = wanted.gradients[s.where.found[told].int().argmax(1)][:, start:end].reshape(-1)
    reached = torch.zeros_like(output) if got is None else got
    mine, values = (vectors(t)[picked].reshape(-1) for t in (reached, output))
    return (values, factor * right - mine) if bool(right.any()) else None


def lost_of(traces: Traces, values: Tensor, lacks: Tensor) -> list[Lost]:
    """Of float64 numbers (n,) whose gradients lack something, the copies that got just that."""
    if len(values) < FEWEST:
        return []
    arrived = [
        one for rank, t in traces.ranks.items() for one in _arrived(t.computed, rank, values)
    ]
    if not arrived or len(arrived) > MOST_ARRIVALS:
        return []
    return list(_of_copies(traces, arrived, _missing(lacks, [one.gradient for one in arrived])))


def _of_copies(
    traces: Traces, arrived: Sequence[_Arrived], missing: Sequence[bool]
) -> Iterator[Lost]:
    copies = dict.fromkeys((one.rank, one.number) for one in arrived)
    for rank, number in copies:
        own = [m for m, one in zip(missing, arrived, strict=True)
               if (one.rank, one.number) == (rank, number)]  # fmt: skip
        taken = _taken(traces.ranks[rank].computed, number)
        if any(own) and taken is not None:
            made = taken.made_at[taken.takes.index(number)]
            yield Lost(rank=rank, taken=taken, made=made, backwards=sum(own), of=len(own))


def _missing(lacks: Tensor, arrived: Sequence[Tensor]) -> list[bool]:
    """Which of these make up what is lacking, each once; none if they do not."""
    columns, none = torch.stack(list(arrived), dim=1), [False] * len(arrived)
    if len(lacks) <= len(arrived) or int(torch.linalg.matrix_rank(columns)) < len(arrived):
        return none
    times = torch.linalg.lstsq(columns, lacks[:, None], driver="gelsd").solution[:, 0]
    left, size = (lacks - columns @ times).abs().max(), columns.abs().max()
    once, never = (times - 1).abs() <= ONCE, times.abs() <= ONCE
    explained = float(left) <= LEFT * float(size) and bool((once | never).all())
    return once.tolist() if explained else none


def _arrived(computed: Computed, rank: int, values: Tensor) -> Iterator[_Arrived]:
    """What reached the copies of these numbers: by backward, where several came."""
    for number, gradients in sorted(computed.arrivals.items()):
        held = computed.values[number]
        place = _places(held.reshape(-1), values) if held.dtype == torch.float64 else None
        if place is None:
            continue
        for gradient in gradients:
            flat = torch.cat([gradient.reshape(-1).double(), torch.zeros(1).double()])
            if gradient.shape == held.shape and bool(flat[place].any()):
                yield _Arrived(rank, number, flat[place])


def _places(held: Tensor, values: Tensor) -> Tensor | None:
    """(n,) where each of the values stands among those held, behind their end where it does not;
    None unless half of the held ones, or of the values, are there."""
    if len(held) < FEWEST or len(held.unique()) < len(held):
        return None
    order = held.argsort()
    at = torch.searchsorted(held[order], values - CLOSE * values.abs()).clamp(max=len(held) - 1)
    place = order[at]
    there = (held[place] - values).abs() <= CLOSE * values.abs()
    if 2 * int(there.sum()) < min(len(held), len(values)):
        return None
    return torch.where(there, place, len(held))


def _taken(computed: Computed, number: int) -> Computation | None:
    return next((c for c in computed.computations if number in c.takes), None)
