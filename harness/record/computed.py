"""What a step computes outside of modules: calls of torch functions, by line, with their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One call of a torch function by a user's line.

    line: `PATH:12`; code: what stands there. takes: its arguments in order: the number of a value,
    or in words what is no tensor. made_at: of each argument, the line and the code where the tensor
    was made, or two empty ones. inside: the modules whose forward runs, the outermost first.
    calls: how many of the trace's calls were there already.
    """

    function: str
    line: str
    code: str
    takes: tuple[int | str, ...]
    made_at: tuple[tuple[str, str], ...]
    inside: tuple[str, ...] = ()
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What one process computed, in order, and the values of the arguments."""

    computations: tuple[Computation, ...] = ()
    values: tuple[Tensor, ...] = ()


def computed_as_json(computed: Computed) -> list[dict[str, Any]]:
    return [asdict(one) for one in computed.computations]


def computed_from(said: Sequence[Mapping[str, Any]], values: Sequence[Tensor]) -> Computed:
    """Of what computed_as_json gave."""
    computations = (
        Computation(
            function=one["function"],
            line=one["line"],
            code=one["code"],
            takes=tuple(one["takes"]),
            made_at=tuple((line, code) for line, code in one["made_at"]),
            inside=tuple(one["inside"]),
            calls=one["calls"],
        )
        for one in said
    )
    return Computed(computations=tuple(computations), values=tuple(values))


def computed_together(found: Sequence[Computed]) -> Computed:
    """Of several runs in one process, one after the other."""
    computations: list[Computation] = []
    values: list[Tensor] = []
    for one in found:
        first = len(values)
        for c in one.computations:
            takes = tuple(t + first if isinstance(t, int) else t for t in c.takes)
            computations.append(replace(c, takes=takes))
        values += one.values
    return Computed(computations=tuple(computations), values=tuple(values))
