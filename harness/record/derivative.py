"""What a Function's backward was given and gave, and whether that is its forward's derivative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sumgrad.record.line import Line
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Back:
    """One call's backward. computation: the call's number among what was computed. outer: what each
    result was given; inner: what it gave for each tensor that it takes. alone: no rank takes part
    in it but this one."""

    computation: int
    outer: tuple[Tensor | None, ...]
    inner: tuple[Tensor | None, ...]
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """What a backward gave beside the derivative.

    differ: how many of numel elements. where: dimensions, and the places in them that alone differ.
    zero: all that differ are zero. moved: its numbers are the derivative's, in other places.
    factors: of each result's share; empty where no such factors give it.
    """

    differ: int
    numel: int
    where: tuple[tuple[int, tuple[int, ...]], ...] = ()
    zero: bool = False
    moved: bool = False
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """Of one of its tensors, by finite differences of the forward.

    function: its class. line: `PATH:12` and what stands there, that calls it; written: where the
    backward stands. call: which of this line, from 0. argument: its name in the forward; leaf:
    whether it is one, as a parameter is. off: how it is off, where that is known. together: the
    forward was run by all its ranks; shares: where it is wrong, by rank, how often it counts what
    this one's results were given. place: of the call among what was computed, and at: which of its
    tensors it is; -1 where it is told of several.
    """

    function: str
    line: Line
    written: str
    call: int
    argument: str
    agrees: bool
    off: Off | None = None
    leaf: bool = False
    together: bool = False
    shares: tuple[tuple[int, float], ...] = ()
    place: int = -1
    at: int = -1


def derivative_from(said: Mapping[str, Any]) -> Derivative:
    """Of what dataclasses.asdict and JSON made of it."""
    line, code = said["line"]
    off = said["off"]
    if off is not None:
        where = tuple((dim, tuple(places)) for dim, places in off["where"])
        off = Off(**{**off, "where": where, "factors": tuple(off["factors"])})
    shares = tuple((int(rank), float(times)) for rank, times in said.get("shares", ()))
    return Derivative(**{**said, "line": (line, code), "off": off, "shares": shares})


def back_as_json(one: Back) -> dict[str, Any]:
    return {
        "computation": one.computation,
        "outer": len(one.outer),
        "inner": len(one.inner),
        "alone": one.alone,
    }


def back_as_tensors(number: int, one: Back) -> dict[str, Tensor]:
    sides = {"outer": one.outer, "inner": one.inner}
    return {
        f"value_back/{number}/{side}/{i}": gradient
        for side, own in sides.items()
        for i, gradient in enumerate(own)
        if gradient is not None
    }


def back_from(number: int, said: Mapping[str, Any], held: Mapping[str, Tensor]) -> Back:
    """Of what back_as_json and back_as_tensors gave."""
    outer, inner = (
        tuple(held.get(f"value_back/{number}/{side}/{i}") for i in range(said[side]))
        for side in ("outer", "inner")
    )
    return Back(computation=said["computation"], outer=outer, inner=inner, alone=said["alone"])
