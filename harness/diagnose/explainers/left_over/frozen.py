"""Parameters that do not require a gradient on a rank, when it should come, in words."""

from __future__ import annotations

from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case

WHEN = {"forward": "when its module is called", "backward": "when the backward reaches its module"}


def with_frozen(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause, behind those wrong parameters that autograd gives nothing, and the single process
    something."""
    traces = case.traces
    if traces is None:
        return diagnosis
    there = traces.single.frozen
    found: dict[str, list[tuple[str, int]]] = {}
    for cell in case.failing_cells:
        if cell.name in there or bool(cell.measured.any()):
            continue
        # Where it is one at both times, the first says it.
        for when in traces.ranks[cell.rank].frozen.get(cell.name, ())[:1]:
            found.setdefault(when, []).append((cell.name, cell.rank))
    if not found:
        return diagnosis
    when, told = max(found.items(), key=lambda item: len(item[1]))
    names, ranks = dict.fromkeys(name for name, _ in told), sorted({rank for _, rank in told})
    cause = (
        f"{some_of([*names])}: requires_grad is False on rank {spans(ranks)} {WHEN[when]}, and is "
        f"not in the single process: autograd gives it no gradient"
    )
    if {*told} != {(cell.name, cell.rank) for cell in case.failing_cells}:
        return replace(diagnosis, because=(cause, *diagnosis.because))
    because = ("every wrong gradient is that of such a parameter, and none came",)
    return replace(
        diagnosis, cause=cause, kind="frozen", because=because, ranks=tuple(ranks),
        standing="proved",
    )  # fmt: skip
