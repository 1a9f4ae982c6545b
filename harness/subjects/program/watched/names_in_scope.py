"""What stands under each name of the functions that a step runs: of what kind, and how large."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

from sumgrad.subjects.program.watched.frames import within
from sumgrad.subjects.users_line import is_of_users_own
from torch import Tensor, nn

SELF = "self"


class NamesInScope:
    """Read where a line of a function calls something, or where a function ends, once for each of
    its lines."""

    def __init__(self) -> None:
        self._seen: set[tuple[CodeType, int]] = set()
        self._of: dict[str, dict[str, str]] = {}

    def see(self, frame: FrameType) -> None:
        """A user's frame, and those that it is called from."""
        at: FrameType | None = frame
        while at is not None:
            key = at.f_code, at.f_lineno
            if key not in self._seen:
                self._seen.add(key)
                if is_of_users_own(at.f_code.co_filename):
                    self._see(at)
            at = at.f_back

    @contextlib.contextmanager
    def of_all_that_ends(self) -> Iterator[None]:
        """Every function of a user's that ends between `with` and its end, on this thread."""

        asked: dict[CodeType, bool] = {}

        def seen(frame: FrameType, event: str, _: object) -> None:
            if event != "return":
                return
            code = frame.f_code
            if code not in asked:
                asked[code] = is_of_users_own(code.co_filename)
            if asked[code]:
                self.see(frame)

        before = sys.getprofile()
        sys.setprofile(seen)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _see(self, frame: FrameType) -> None:
        known = self._of.setdefault(within(frame), {})
        held = {**frame.f_locals}
        own = held.pop(SELF, None)
        for name, value in held.items():
            known[name] = kind_of(value)
        for name, value in _attributes(own).items():
            known[f"{SELF}.{name}"] = kind_of(value)

    def found(self) -> dict[str, Mapping[str, str]]:
        """Function, as of a Computation's `within` -> name, as it stands in the code -> kind."""
        return {**self._of}


def kind_of(value: Any) -> str:
    """Alike of two that could stand for each other: `tensor float64 3x4`, `Linear 3x4`, `int`."""
    if isinstance(value, Tensor):
        own = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        return f"{own} {str(value.dtype).removeprefix('torch.')} {_size(value)}"
    if isinstance(value, nn.Module):
        sizes = [_size(p) for p in value.parameters(recurse=False)]
        return " ".join([type(value).__qualname__, *sizes])
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} of {len(value)} {kind_of(value[0]) if value else ''}"
    return type(value).__qualname__


def _size(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


def _attributes(own: Any) -> dict[str, Any]:
    held = dict(getattr(own, "__dict__", {}))
    for kept in ("_parameters", "_buffers", "_modules"):  # of a module
        held.update(held.pop(kept, None) or {})
    return {name: value for name, value in held.items() if not name.startswith("_")}
