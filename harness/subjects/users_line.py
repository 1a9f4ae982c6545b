"""Which line of a user's own file runs, outside of torch and of what observes it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = Path(os.path.abspath(__file__)).parents[1]  # as the names of its files begin
_OURS, _STEPS = str(_PACKAGE) + os.sep, str(_PACKAGE / "workloads") + os.sep


def is_users(name: str) -> bool:
    """Whether a file's name is none of torch's, and none that only observes."""
    ours = name.startswith(_OURS) and not name.startswith(_STEPS)
    return not ours and not name.startswith(_TORCH) and "contextlib" not in name


def users_line() -> str:
    """`file.py:12`, the nearest one below the caller; the outermost where all are ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if is_users(frame.f_code.co_filename):
            break
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
