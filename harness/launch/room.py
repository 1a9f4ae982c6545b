"""Is there memory for every process of a check at once? Asked before they start."""

from __future__ import annotations

import math

from sumgrad.base.memory import available_memory
from sumgrad.record.spec import RunSpec

# Of a rank and of a reference: what torch takes, and copies of the model in float64, measured.
BASE_BYTES, BYTES_PER_PARAMETER = 400 << 20, 40


def have_room(spec: RunSpec, processes: int) -> bool:
    """Whether so many of a Program's processes fit into what is free, as far as can be told."""
    available = available_memory()
    if available is None or spec.facts is None:
        return True
    numel = sum(math.prod(shape) for shape in spec.facts.params.values())
    return processes * (BASE_BYTES + BYTES_PER_PARAMETER * numel) <= available
