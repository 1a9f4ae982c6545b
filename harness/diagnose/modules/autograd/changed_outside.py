"""Parameters whose numbers a rank's line changes outside of autograd, where the single process
computes the same of them with a graph: a mask that is multiplied into `weight.data`.

In: traces, names of parameters. Out: the line, and the one that the single process has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.record.computed import Computation, Computed, same_value
from sumgrad.record.trace import Traces
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedOutside:
    """On `rank`, `mine` gives without a graph what `its` makes of parameter `name` with one."""

    rank: int
    name: str
    mine: Computation
    its: Computation


def changed_outside(traces: Traces, names: Sequence[str]) -> Iterator[ChangedOutside]:
    """Of each of these parameters and each rank the first such line."""
    single = traces.single
    for name in names:
        weight = single.params.get(name)
        made = [] if weight is None else list(_made_of(single.computed, weight))
        for rank, trace in traces.ranks.items() if made else ():
            found = next(_without_graph(trace.computed, made), None)
            if found is not None:
                mine, its = found
                yield ChangedOutside(rank=rank, name=name, mine=mine, its=its)


def _made_of(computed: Computed, weight: Tensor) -> Iterator[tuple[Computation, Tensor]]:
    """What a line makes of a parameter, of the same shape, with a graph."""
    for c in computed.computations:
        taken = [t for t in c.takes if isinstance(t, int)]
        given = [n for n in c.gives if n in computed.with_graph]
        if len(given) != 1 or computed.values[given[0]].shape != weight.shape:
            continue
        if any(same_value(computed.values[t].double(), weight.double()) for t in taken):
            yield c, computed.values[given[0]]


def _without_graph(
    computed: Computed, made: Sequence[tuple[Computation, Tensor]]
) -> Iterator[tuple[Computation, Computation]]:
    """In place, so that it is the parameter that is another."""
    for c in computed.computations:
        for n in (n for n in c.gives if _is_in_place(computed, c, n)):
            for its, value in made:
                if its.function == c.function and same_value(computed.values[n], value):
                    yield c, its


def _is_in_place(computed: Computed, c: Computation, number: int) -> bool:
    if number in computed.with_graph:
        return False
    changed = (one.after for one in computed.changes if (one.line, one.code) == (c.line, c.code))
    return number == c.takes[0] or number in changed
