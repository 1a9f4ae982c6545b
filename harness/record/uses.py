"""What each use of a parameter gave of its gradient, on one rank: `trace/` has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One of autograd's functions that takes a parameter: its name, the user's line that called it,
    `PATH:12`, and what stands there."""

    function: str
    line: str
    code: str


Uses = Mapping[str, Mapping[Use, Tensor]]  # by parameter: the sum over the step's backwards


def uses_as_json(uses: Uses) -> dict[str, Any]:
    return {name: [asdict(use) for use in own] for name, own in uses.items()}


def uses_as_tensors(uses: Uses) -> dict[str, Tensor]:
    return {f"use/{i}/{n}": t for n, own in uses.items() for i, t in enumerate(own.values())}


def uses_from(said: Mapping[str, Any], held: Mapping[str, Tensor]) -> Uses:
    """Of what the two others gave."""
    return {
        name: {Use(**use): held[f"use/{i}/{name}"] for i, use in enumerate(own)}
        for name, own in said.items()
    }
