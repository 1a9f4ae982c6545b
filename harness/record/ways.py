"""What autograd passes on the way from one module's tensor to another's: functions, by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Numbers are moved, copied or left out; none is another afterwards.
MOVES = {
    "Alias", "AsStrided", "Cat", "Clone", "Expand", "Index", "IndexSelect", "Permute", "Repeat",
    "ReshapeAlias", "Select", "Slice", "Split", "SplitWithSizes", "Squeeze", "Stack", "T", "ToCopy",
    "Transpose", "Unbind", "UnsafeSplit", "UnsafeView", "Unsqueeze", "View", "ViewAs", "Flip",
    "Roll", "Gather", "_FromTorchTensor", "_ToTorchTensor",
}  # fmt: skip

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


def passed_as_json(found: Mapping[str, tuple[Passed, ...]]) -> dict[str, Any]:
    return {name: [asdict(one) for one in passed] for name, passed in found.items()}


def passed_from(said: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[Passed, ...]]:
    """Of what passed_as_json gave."""
    return {name: tuple(Passed(**one) for one in passed) for name, passed in said.items()}


def ways_as_json(ways: Ways) -> dict[str, Any]:
    return {to: passed_as_json(found) for to, found in ways.items()}


def ways_from(said: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Ways:
    """Of what ways_as_json gave."""
    return {to: passed_from(found) for to, found in said.items()}
