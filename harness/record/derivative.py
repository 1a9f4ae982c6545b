"""Whether a Function's backward gave the derivative of its forward, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    backward stands. call: which of this line, from 0. argument: its name in the forward. off: how
    it is off, where it does not agree and was looked at element by element.
    """

    function: str
    line: tuple[str, str]
    written: str
    call: int
    argument: str
    agrees: bool
    off: Off | None = None


def derivative_from(said: Mapping[str, Any]) -> Derivative:
    """Of what dataclasses.asdict and JSON made of it."""
    line, code = said["line"]
    off = said["off"]
    if off is not None:
        where = tuple((dim, tuple(places)) for dim, places in off["where"])
        off = Off(**{**off, "where": where, "factors": tuple(off["factors"])})
    return Derivative(**{**said, "line": (line, code), "off": off})
