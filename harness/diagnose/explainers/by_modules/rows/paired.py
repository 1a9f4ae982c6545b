"""Weights whose gradients are made of inputs and gradients of different calls, in words."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import looked_by_rows, named
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.inputs.paired_inputs import Paired, paired_otherwise

MOST_SHOWN = 6


def inputs_of_other_calls(case: Case, left: Left) -> Iterator[Explanation]:
    """Linear layers, right in all that goes in and out, of which every wrong weight's gradient is
    made of one call's gradient beside another's input."""
    look, traces = looked_by_rows(case), case.traces
    if look is None or traces is None or not case.failing_cells:
        return
    told: dict[str, dict[int, list[Paired]]] = {}
    for cell in case.failing_cells:
        alone = {rank: trace for rank, trace in traces.ranks.items() if rank == cell.rank}
        found = paired_otherwise(alone, cell.name, cell.measured) or paired_otherwise(
            traces.ranks, cell.name, cell.measured
        )
        if not found:
            return
        told.setdefault(cell.name, {})[cell.rank] = found
    modules = [named(look, name.rpartition(".")[0]) for name in told]
    yield explained(
        case,
        Diagnosis(
            cause=f"the weight's gradient of {some_of(modules)} is made of gradients beside the "
            f"inputs of other calls",
            kind="saved_input",
            ranks=tuple(sorted({cell.rank for cell in case.failing_cells})),
            because=tuple(_in_words(name, ranks) for name, ranks in told.items())[:MOST_SHOWN],
            standing="proved",
        ),
    )


def _in_words(name: str, by_rank: dict[int, list[Paired]]) -> str:
    """Of the first rank that holds a wrong gradient of it."""
    pairs = next(iter(by_rank.values()))
    off = [p for p in pairs if p.call != p.beside]
    shown = "; ".join(
        f"on rank {p.rank} that of call {p.call} with the input of call {p.beside}"
        for p in off[:MOST_SHOWN]
    )
    more = f"; {len(off) - MOST_SHOWN} more" if len(off) > MOST_SHOWN else ""
    return f"{name} is the sum of its calls' gradients, each times an input: {shown}{more}"
