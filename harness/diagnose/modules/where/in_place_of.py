"""A module that is called with what goes into another one like it in the single process."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sumgrad.diagnose.modules.values.matching import match, vectors
from sumgrad.record.trace import INTO, Trace, Traces
from torch import Tensor

MOST_COMPARED = 64  # calls of one module


def in_place_of(traces: Traces, module: str, ranks: Sequence[int], tolerance: float) -> str | None:
    """The one module, of the same name but for a number, into which all that goes in the single
    process that these ranks hand to `module`; None where there is none, or several."""
    pattern = re.sub(r"\d+", "#", module)
    others = [
        name
        for name in traces.single.classes
        if name != module
        and re.sub(r"\d+", "#", name) == pattern
        and traces.single.classes[name] == traces.single.classes.get(module)
    ]
    mine = [value for rank in ranks for value in _gone_into(traces.ranks[rank], module)]
    if not mine or not others or not all(_gone_into(traces.ranks[r], module) for r in ranks):
        return None
    own = _gone_into(traces.single, module)
    if all(_is_there(value, own, tolerance) for value in mine[:MOST_COMPARED]):
        return None  # as what all layers are handed
    found = [
        name
        for name in others
        if (there := _gone_into(traces.single, name))
        and all(_is_there(value, there, tolerance) for value in mine[:MOST_COMPARED])
    ]
    return found[0] if len(found) == 1 else None


def _gone_into(trace: Trace, module: str) -> list[Tensor]:
    return [
        output
        for call, output in zip(trace.calls, trace.outputs, strict=True)
        if call.module == f"{INTO}{module}" and not call.recomputed and call.part == 0
    ]


def _is_there(value: Tensor, whole: Sequence[Tensor], tolerance: float) -> bool:
    for other in whole:
        where = match(vectors(value), vectors(other), tolerance)
        if where is not None and bool(where.found.any(1).all()):
            return True
    return False
