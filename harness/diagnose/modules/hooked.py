"""Whether what a module is given or gives is right before the hooks of others see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sumgrad.diagnose.modules.matching import match, vectors
from sumgrad.diagnose.modules.seen import COARSE, TOLERANCES, Seen
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace, Traces
from torch import Tensor


def hooks_that_change(traces: Traces, seen: Sequence[Seen], dtype: str) -> tuple[Line, ...]:
    """Where the hooks start that see what is wrong, if all of it was right before they did: every
    vector of every part, in each of these calls, is one that is there in the single process."""
    names = {s.call.module for s in seen}
    if len(names) != 1:
        return ()
    name, tolerance = names.pop(), TOLERANCES.get(dtype, COARSE)
    lines: dict[Line, None] = {}
    for rank in {s.rank for s in seen}:
        trace = traces.ranks[rank]
        calls = {s.call.number for s in seen if s.rank == rank}
        held = [h for h in trace.hooked if h.module == name and h.number in calls]
        if not calls <= {h.number for h in held}:
            return ()
        for one in held:
            there = _there(traces.single, name, one.part)
            where = match(vectors(one.value), there, tolerance) if len(there) else None
            if where is None or not bool(where.here.all()):
                return ()
        lines |= dict.fromkeys(trace.hooks.get(name, ()))
    return tuple(line for line in lines if line[0])


def _there(single: Trace, name: str, part: int) -> Tensor:
    """(N, C) what the single process has before the hooks that it has, or without any."""
    held = [h.value for h in single.hooked if (h.module, h.part) == (name, part)]
    if name not in single.hooks:
        pairs = zip(single.calls, single.outputs, strict=True)
        held = [o for c, o in pairs if (c.module, c.part) == (name, part) and not c.recomputed]
    found = [vectors(tensor) for tensor in held]
    if len({v.shape[1] for v in found}) != 1:
        return torch.zeros(0, 1, dtype=torch.float64)
    return torch.cat(found)
