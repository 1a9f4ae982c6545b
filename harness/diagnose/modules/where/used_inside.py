"""Outputs that a module itself goes on with: their gradient is that of more than what comes after.

A block that hands on the sum of its residual, and norms it too, has in one process a gradient there
of both; a fused kernel in its place, on a rank, of what comes after alone.
"""

from __future__ import annotations

from dataclasses import replace

from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.record.computed import MODULE, same_value
from sumgrad.record.trace import Trace, Traces


def unless_used_inside(s: Seen, traces: Traces) -> Seen:
    """Untold where a module uses an output itself in one process, and not on a rank, or only there:
    the two gradients are not of the same."""
    if s.backward != "wrong" or s.wrong is None:
        return s
    there = any(
        _is_used_inside(traces.single, at)
        for at, call in enumerate(traces.single.calls)
        if (call.module, call.part) == (s.call.module, s.call.part) and not call.recomputed
    )
    trace = traces.ranks[s.rank]
    if there == _is_used_inside(trace, trace.calls.index(s.call)):
        return s
    return replace(s, backward="untold", wrong=None, factors=None)


def _is_used_inside(trace: Trace, at: int) -> bool:
    """Whether a line of the module's own forward takes this output of it."""
    module, output = trace.calls[at].module, trace.outputs[at]
    return any(
        same_value(trace.computed.values[number], output)
        for c in trace.computed.computations
        if c.inside
        and c.inside[-1] == module
        and not c.function_of  # autograd does not see what runs in a Function
        and not c.function.startswith(MODULE)
        for number in c.takes
        if isinstance(number, int)
    )
