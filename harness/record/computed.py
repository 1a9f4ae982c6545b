"""What a step computes outside of modules: calls of torch functions, by line, with their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """One call of a torch function by a user's line.

    line: `FILE:12`; code: what stands there. takes: its arguments in order: the number of a value,
    or in words what is no tensor. made_at: of each argument, where the tensor was made, or "".
    """

    function: str
    line: str
    code: str
    takes: tuple[int | str, ...]
    made_at: tuple[str, ...]


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
        Computation(**{**one, "takes": tuple(one["takes"]), "made_at": tuple(one["made_at"])})
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
            computations.append(
                Computation(
                    function=c.function, line=c.line, code=c.code, takes=takes, made_at=c.made_at
                )
            )
        values += one.values
    return Computed(computations=tuple(computations), values=tuple(values))
