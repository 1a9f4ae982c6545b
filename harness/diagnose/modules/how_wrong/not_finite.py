"""Numbers that are none: where gradients of a rank are not finite, and the single process's are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.record.computed import Computation
from sumgrad.record.trace import INTO, Trace, Traces


@dataclass(frozen=True, slots=True, kw_only=True)
class NotFinite:
    """calls: (module, number) whose output gets such a gradient. line: whose results get finite
    ones, and an argument not, the nearest to the loss; None where none is known."""

    rank: int
    calls: tuple[tuple[str, int], ...]
    line: Computation | None


def not_finite(traces: Traces) -> Iterator[NotFinite]:
    """Nothing where the single process has some."""
    if _calls(traces.single):
        return
    for rank, trace in traces.ranks.items():
        calls, line = _calls(trace), _line(trace)
        if calls or line is not None:
            yield NotFinite(rank=rank, calls=calls, line=line)


def _calls(trace: Trace) -> tuple[tuple[str, int], ...]:
    """The nearest to the loss first."""
    found = {
        (call.module, call.number): None
        for call, gradient in zip(trace.calls, trace.gradients, strict=True)
        if gradient is not None and not bool(torch.isfinite(gradient).all())
    }
    return tuple(one for one in reversed(found) if not one[0].startswith(INTO))


def _line(trace: Trace) -> Computation | None:
    """Of what is taken once: else another line may have given it."""
    gradients = trace.computed.gradients[0] if trace.computed.gradients else {}
    finite = {n: bool(torch.isfinite(g).all()) for n, g in gradients.items()}
    takers = Counter(n for c in trace.computed.computations for n in {*c.takes})
    for c in reversed(trace.computed.computations):
        given = [finite[n] for n in c.gives if n in finite]
        taken = [finite[n] for n in c.takes if n in finite and takers[n] == 1]
        if given and all(given) and not all(taken):
            return c
    return None
