"""Rows of a table that the single process looks up, and no rank does; and lines of ranks that look
up others than a module does there which they do not call, as one with an offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sumgrad.record.computed import Computation, same_value
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

TABLES = ("Embedding", "EmbeddingBag")  # by the class, as sources have it
LOOKS_UP = "embedding"
FEWEST = 3  # rows that tell something
MOST_NUMBERS = 1 << 20  # of a table, and of one output: more cost too much to be looked through


def rows_looked_up_there_alone(traces: Traces, module: str) -> list[int] | None:
    """None where it is no table or a large one, some ranks' outputs were not kept, two of its rows
    are the same, or some output is none of them, as a sum of several."""
    weight = traces.single.params.get(f"{module}.weight")
    is_a_table = traces.single.sources.get(module, "").partition(" ")[0] in TABLES
    if weight is None or not is_a_table or weight.dim() != 2 or weight.numel() > MOST_NUMBERS:
        return None
    every = (traces.single, *traces.ranks.values())
    if any(module in trace.left_out or _gives_much(trace, module) for trace in every):
        return None
    rows = {tuple(row): i for i, row in enumerate(weight.double().tolist())}
    there, *ranks = (_vectors(trace, module, weight.shape[1]) for trace in every)
    if len(rows) < len(weight) or not there <= rows.keys():
        return None
    return sorted(rows[vector] for vector in there.difference(*ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shifted:
    """Ranks look up rows `here` of a module's table at a line, where the module, which they do not
    call, looks up rows `there` in the single process, and not some of these."""

    ranks: tuple[int, ...]
    module: str
    made: Computation
    here: tuple[int, ...]
    there: tuple[int, ...]

    @property
    def by(self) -> int:
        """How much further all of them are there; 0 where they are not as far apart."""
        apart = {b - a for a, b in zip(self.here, self.there, strict=False)}
        return apart.pop() if len(apart) == 1 and len(self.here) == len(self.there) else 0


def looked_up_beside(traces: Traces) -> Iterator[Shifted]:
    """Each module of which that is so, and the first such line."""
    single, called = traces.single, {c.module for t in traces.ranks.values() for c in t.calls}
    for name, weight in single.params.items():
        module = name.rpartition(".")[0]
        if module in called or module in single.left_out:
            continue
        if weight.dim() != 2 or weight.numel() > MOST_NUMBERS or _gives_much(single, module):
            continue
        found = list(_at_lines(traces, weight))
        rows = {tuple(row): i for i, row in enumerate(weight.double().tolist())}
        vectors = _vectors(single, module, weight.shape[1])
        if not found or len(rows) < len(weight) or not vectors <= rows.keys():
            continue
        here = tuple(sorted({row for _, _, own in found for row in own}))
        there = tuple(sorted(rows[vector] for vector in vectors))
        if len(here) >= FEWEST and there and not {*here} <= {*there}:
            ranks = tuple(dict.fromkeys(rank for rank, *_ in found))
            yield Shifted(ranks=ranks, module=module, made=found[0][1], here=here, there=there)


def _at_lines(traces: Traces, weight: Tensor) -> Iterator[tuple[int, Computation, list[int]]]:
    """By rank, what looks rows of it up by their numbers, and which."""
    for rank, trace in traces.ranks.items():
        values = trace.computed.values
        for c in trace.computed.computations:
            at, table = c.takes[:2] if len(c.takes) > 1 else ("", "")
            if c.function != LOOKS_UP or not isinstance(at, int) or not isinstance(table, int):
                continue
            if same_value(values[table].double(), weight.double()):
                yield rank, c, values[at].unique().tolist()


def _gives_much(trace: Trace, module: str) -> bool:
    return any(
        call.module == module and output.numel() > MOST_NUMBERS
        for call, output in zip(trace.calls, trace.outputs, strict=True)
    )


def _vectors(trace: Trace, module: str, width: int) -> set[tuple[float, ...]]:
    """All that a module gives."""
    return {
        tuple(vector)
        for call, output in zip(trace.calls, trace.outputs, strict=True)
        if call.module == module and output.shape[-1:] == (width,)
        for vector in output.double().reshape(-1, width).unique(dim=0).tolist()
    }
