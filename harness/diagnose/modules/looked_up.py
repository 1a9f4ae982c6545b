"""Rows of a table that the single process looks up, and no rank does."""

from __future__ import annotations

from sumgrad.record.trace import Trace, Traces

TABLES = ("Embedding", "EmbeddingBag")  # by the class, as sources have it


def rows_looked_up_there_alone(traces: Traces, module: str) -> list[int] | None:
    """None where it is no table, some ranks' outputs were not kept, two of its rows are the same,
    or some output is none of them, as a sum of several."""
    weight = traces.single.params.get(f"{module}.weight")
    is_a_table = traces.single.sources.get(module, "").partition(" ")[0] in TABLES
    if weight is None or not is_a_table or weight.dim() != 2:
        return None
    if any(module in trace.left_out for trace in (traces.single, *traces.ranks.values())):
        return None
    rows = {tuple(row): i for i, row in enumerate(weight.double().tolist())}
    there, *ranks = (_vectors(trace, module, weight.shape[1])
                     for trace in (traces.single, *traces.ranks.values()))  # fmt: skip
    if len(rows) < len(weight) or not there <= rows.keys():
        return None
    return sorted(rows[vector] for vector in there.difference(*ranks))


def _vectors(trace: Trace, module: str, width: int) -> set[tuple[float, ...]]:
    """All that a module gives."""
    return {
        tuple(vector)
        for call, output in zip(trace.calls, trace.outputs, strict=True)
        if call.module == module and output.shape[-1:] == (width,)
        for vector in output.double().reshape(-1, width).unique(dim=0).tolist()
    }
