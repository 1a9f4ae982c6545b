"""The user's frame that calls a torch function: its line, its place in the code, its function."""

from __future__ import annotations

import linecache
import sys
from itertools import islice
from types import CodeType, FrameType

from sumgrad.record.line import Line
from sumgrad.subjects.users_line import is_users

# On the way from a user's line to here: some of torch's own files, and the lift's function mode.
WAYS = (
    "functional.py", "_tensor.py", "overrides.py", "_jit_internal.py", "nn/utils/clip_grad.py",
    "utils/_contextlib.py", "program/lift.py",
)  # fmt: skip
_SITES: dict[tuple[CodeType, int], tuple[str, str]] = {}


def users_frame(depth: int = 2) -> FrameType | None:
    """That of the user's line that calls; None where torch itself does, as in its modules."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return None if name.startswith("<") else frame
        if not name.endswith(WAYS):
            return None
        frame = frame.f_back
    return None


def within(frame: FrameType) -> str:
    """The function that a frame runs, and where it begins."""
    code = frame.f_code
    return f"{code.co_filename}:{code.co_firstlineno} {getattr(code, 'co_qualname', code.co_name)}"


def site_of(frame: FrameType) -> tuple[str, str]:
    """Which call in the code a frame is at, and the expression, where it is one line's."""
    code, at = frame.f_code, frame.f_lasti
    key = code, at
    if key not in _SITES:
        place = next(islice(code.co_positions(), at // 2, None), (None, None, None, None))
        line, end_line, start, end = place
        text = ""
        if line is not None and line == end_line and start is not None and end is not None:
            whole = linecache.getline(code.co_filename, line).encode()
            text = whole[start:end].decode(errors="replace").strip()
        _SITES[key] = f"{code.co_filename}:{frame.f_lineno}:{at}", text
    return _SITES[key]


def words(frame: FrameType) -> Line:
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", code
