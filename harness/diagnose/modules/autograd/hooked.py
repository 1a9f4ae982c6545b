"""Whether what a module is given or gives is right before the hooks of others see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from sumgrad.diagnose.modules.values.seen import COARSE, TOLERANCES, Seen, see
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.record.line import Line
from sumgrad.record.trace import Call, Trace, Traces
from torch import Tensor

Rows = Mapping[tuple[int, int], Tensor | None]  # rank and number of a call -> rows of the batch


def hooks_that_change(
    traces: Traces, seen: Sequence[Seen], dtype: str, rows: Rows | None = None
) -> tuple[Line, ...]:
    """Where the hooks start that see what is wrong, if all of it was right before they did: every
    vector of every part, in each of these calls, stands where the single process has it. rows: of
    the calls, by what goes into them, where that is told."""
    names = {s.call.module for s in seen}
    if len(names) != 1:
        return ()
    name, tolerance = names.pop(), TOLERANCES.get(dtype, COARSE)
    whole = by_module(_before_hooks(traces.single, name), name.__eq__)
    lines: dict[Line, None] = {}
    for rank in {s.rank for s in seen}:
        trace = _before_hooks(traces.ranks[rank], name)
        asked = {s.call.number for s in seen if s.rank == rank}
        at = [i for i, c in enumerate(trace.calls) if c.number in asked]
        if not asked <= {trace.calls[i].number for i in at} or not traces.ranks[rank].hooks:
            return ()
        for i in at:
            one = see(rank, trace, i, whole, tolerance)
            own = (rows or {}).get((rank, one.call.number))
            if not _is_right(one) or not _are_the_same(own, one.rows):
                return ()
        lines |= dict.fromkeys(traces.ranks[rank].hooks.get(name, ()))
    return tuple(line for line in lines if line[0])


def _before_hooks(trace: Trace, name: str) -> Trace:
    """With what is there before hooks in place of what is there after; of a process that has no
    hooks there, as it is."""
    if name not in trace.hooks:
        kept = [(c, o) for c, o in zip(trace.calls, trace.outputs, strict=True)
                if c.module == name and not c.recomputed]  # fmt: skip
    else:
        kept = [
            (Call(module=h.module, number=h.number, part=h.part, operation=0,
                  operation_back=None, recomputed=False), h.value)
            for h in trace.hooked
            if h.module == name
        ]  # fmt: skip
    return replace(
        trace,
        calls=tuple(c for c, _ in kept),
        outputs=tuple(o for _, o in kept),
        gradients=(None,) * len(kept),
        by_term={},
    )


def _is_right(one: Seen) -> bool:
    """Whether every vector was compared, and is there, in its order; padding tells nothing."""
    where = one.where
    return (
        one.forward == "right"
        and one.in_order
        and where is not None
        and bool(where.found.any(1).all())
    )


def _are_the_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Rows of a call, where both are told: those that go in and those that come out, in order."""
    if a is None or b is None:
        return True
    a, b = (torch.unique_consecutive(rows[rows >= 0]) for rows in (a, b))
    return torch.equal(a, b)
