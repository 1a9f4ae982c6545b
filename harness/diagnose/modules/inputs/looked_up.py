"""Rows of a table that the single process looks up, and no rank does."""

from __future__ import annotations

from sumgrad.record.trace import Trace, Traces

TABLES = ("Embedding", "EmbeddingBag")  # by the class, as sources have it
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
