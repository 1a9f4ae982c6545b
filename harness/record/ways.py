"""What autograd passes on the way from one module's tensor to another's: functions, by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Ways = Mapping[str, Mapping[str, tuple["Passed", ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One of autograd's functions that a rank's forward called.

    function: `Mul`, or the class of a torch.autograd.Function. line: `PATH:12` of the user's that
    called it, and code, what stands there; empty where none did. written: where the backward of a
    Function stands; empty where it is one of torch's formulas. own: it is the user's Function.
    """

    function: str
    line: str = ""
    code: str = ""
    written: str = ""
    own: bool = False


def ways_as_json(ways: Ways) -> dict[str, Any]:
    return {
        to: {start: [asdict(one) for one in passed] for start, passed in found.items()}
        for to, found in ways.items()
    }


def ways_from(said: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Ways:
    """Of what ways_as_json gave."""
    return {
        to: {start: tuple(Passed(**one) for one in passed) for start, passed in found.items()}
        for to, found in said.items()
    }
