"""What modules with hooks are called with before these run, and what their forward returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hooked:
    """One tensor, as it is before the hooks of others see it.

    module, number, part: as of a Call of the same trace, which has what the hooks make of it.
    """

    module: str
    number: int
    part: int
    value: Tensor


def hooked_as_tensors(hooked: Sequence[Hooked]) -> dict[str, Tensor]:
    """`hooked/NUMBER` -> tensor."""
    return {f"hooked/{i}": one.value for i, one in enumerate(hooked)}


def hooked_as_json(hooked: Sequence[Hooked]) -> list[list[Any]]:
    """In the order of hooked_as_tensors."""
    return [[one.module, one.number, one.part] for one in hooked]


def hooked_from(said: Sequence[Sequence[Any]], held: Mapping[str, Tensor]) -> tuple[Hooked, ...]:
    """Of what the two gave, the tensors among others."""
    return tuple(
        Hooked(module=module, number=number, part=part, value=held[f"hooked/{i}"])
        for i, (module, number, part) in enumerate(said)
    )
