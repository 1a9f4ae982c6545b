"""Where a tensor that came from another rank was made there, in words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sumgrad.diagnose.explainers.by_modules.lines import expression
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint
from sumgrad.record.computed import Computation
from sumgrad.record.trace import Traces
from torch import Tensor

FEWEST = 2  # different numbers that are no chance
JOINS = {"cat", "stack", "concat", "concatenate"}


@as_a_hint
def made_on_another_rank(traces: Traces, rank: int, value: Tensor | None) -> list[str]:
    """The first line of another rank that gives just these numbers in this order; of what was put
    together here, of each part."""
    if value is None:
        return []
    whole = [*_made(traces, rank, value)]
    if whole:
        return [f"its numbers were made on {whole[0]}"]
    own = traces.ranks[rank].computed
    joined = [c for c in own.computations if c.function in JOINS and _gives(own.values, c, value)]
    parts = [own.values[n] for c in joined[:1] for n in c.takes if isinstance(n, int)]
    found = dict.fromkeys(text for part in parts for text in [*_made(traces, rank, part)][:1])
    return [f"of its numbers a part was made on {text}" for text in found]


def _made(traces: Traces, rank: int, value: Tensor) -> Iterator[str]:
    """On other ranks, at lines that do not give it here."""
    own = traces.ranks[rank].computed
    here = {c.site for c in own.computations if _gives(own.values, c, value)}
    for other, trace in traces.ranks.items():
        for c in trace.computed.computations if other != rank else ():
            if c.site not in here and _gives(trace.computed.values, c, value):
                yield f"rank {other} at {expression(c)}"


def _gives(values: tuple[Tensor, ...], c: Computation, value: Tensor) -> bool:
    flat = value.reshape(-1)
    return len(flat.unique()) >= FEWEST and any(
        values[n].numel() == flat.numel() and torch.equal(values[n].reshape(-1), flat)
        for n in c.gives
    )
