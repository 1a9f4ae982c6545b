"""Which line of a user's own file runs, outside of torch and of what observes it."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

from sumgrad.base.files import is_librarys

MOST_LINES = 6  # of a stack that is kept
_SPEC = importlib.util.find_spec("torch")  # where it is, and it is not imported for that
_TORCH = os.path.dirname(os.path.abspath(_SPEC.origin)) + os.sep if _SPEC and _SPEC.origin else "<"
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_PACKAGE = Path(os.path.abspath(__file__)).parents[1]  # as the names of its files begin
_OURS, _STEPS = str(_PACKAGE) + os.sep, str(_PACKAGE / "workloads") + os.sep


def is_users(name: str) -> bool:
    """Whether a file's name is none of torch's, and none that only observes."""
    ours = name.startswith(_OURS) and not name.startswith(_STEPS)
    return not ours and not name.startswith(_TORCH) and "contextlib" not in name


def is_of_users_own(name: str) -> bool:
    """Whether a file is a user's own: none of Python's, of an installed package, of torch's, and
    none that only observes."""
    return is_users(name) and not is_librarys(name) and not name.startswith((_STANDARD, "<"))


def users_lines() -> tuple[tuple[str, str], ...]:
    """(`PATH:12`, what stands there) of a user's lines that run, the innermost first: of those of
    libraries the innermost alone."""
    found: list[tuple[str, str]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < MOST_LINES:
        name = frame.f_code.co_filename
        if is_users(name) and not name.startswith("<") and not (found and is_librarys(name)):
            code = linecache.getline(name, frame.f_lineno).strip()
            found.append((f"{name}:{frame.f_lineno}", code))
        frame = frame.f_back
    return tuple(found)


def users_line() -> str:
    """`file.py:12`, the nearest one below the caller; the outermost where all are ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if is_users(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return _in_short(frame)


def users_own_line() -> str:
    """The same, of a file of no installed package where one is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name) and not name.startswith("<") and not is_librarys(name):
            return _in_short(frame)
        frame = frame.f_back
    return users_line()


def _in_short(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
