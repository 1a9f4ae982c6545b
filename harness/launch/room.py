"""Is there memory for every process of a check at once, and a core? Asked before they start."""

from __future__ import annotations

import math
import os

from sumgrad.base.memory import available_memory
from sumgrad.record.spec import RunSpec

# Of a rank and of a reference: what torch takes, and copies of the model in float64, measured.
BASE_BYTES, BYTES_PER_PARAMETER = 400 << 20, 40
LARGE = 256 << 20  # copies of parameters: where they are so large, peaks of memory must not meet
MOST_OF_A_CORE = 16  # ranks, of which each waits a while for its turn in a step


def have_room(spec: RunSpec, processes: int) -> bool:
    """Whether so many of a Program's processes fit into what is free, as far as can be told."""
    available = available_memory()
    if available is None or spec.facts is None:
        return True
    return processes * BASE_BYTES + _copies(spec, processes) <= available


def why_references_wait(spec: RunSpec, ranks: int, references: int) -> str:
    """What a check that does not compute references beside its ranks lacks; "" if it does.

    Where the ranks have all cores, large references beside them would end no sooner.
    """
    if not have_room(spec, ranks + references):
        return "there is no memory for both at once"
    if _copies(spec, ranks + references) > LARGE and _cores() < ranks + references:
        return "they have all cores, and their memory is needed again"
    return ""


def on_few_cores(ranks: int) -> str:
    """What is to be said of so many ranks that their cores are each of many; "" of others."""
    return f" on {_cores()} cores" if ranks > MOST_OF_A_CORE * _cores() else ""


def _copies(spec: RunSpec, processes: int) -> int:
    """Bytes of a Program's parameters and what goes with them, in so many processes."""
    shapes = spec.facts.params.values() if spec.facts else []
    return processes * BYTES_PER_PARAMETER * sum(math.prod(shape) for shape in shapes)


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
