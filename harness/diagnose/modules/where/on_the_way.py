"""What a rank's autograd passes between two modules, by way of those in between."""

from __future__ import annotations

from sumgrad.record.trace import Trace
from sumgrad.record.ways import Passed


def passed_between(trace: Trace, start: str, end: str) -> tuple[Passed, ...] | None:
    """From the output of module `start` to `end`, in the order of the forward; None where autograd
    knows no way.

    end: a module, for its output; INTO and one, for what goes into it; or LOSS.
    """
    found: dict[Passed, None] = {}
    return tuple(found) if _collect(trace, start, end, found, {}) else None


def _collect(
    trace: Trace, start: str, at: str, found: dict[Passed, None], known: dict[str, bool]
) -> bool:
    """Whether a way from `start` leads here; what is passed on it is put into `found`."""
    if at in known:
        return known[at]
    known[at] = False  # while it is looked for: a module and the last one inside it are one
    for before, passed in trace.ways.get(at, {}).items():
        if before == start or _collect(trace, start, before, found, known):
            known[at] = True
            found |= dict.fromkeys(passed)
    return known[at]
