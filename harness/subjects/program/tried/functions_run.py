"""Which functions of a user's own run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import CodeType, FrameType

from sumgrad.subjects.program.watched.frames import within
from sumgrad.subjects.users_line import is_of_users_own


@contextlib.contextmanager
def functions_run() -> Iterator[set[str]]:
    """Those that have a name and end between `with` and its end, on this thread: `PATH:10 NAME`."""
    found, seen = set[str](), set[CodeType]()

    def at_an_event(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and code not in seen:
            seen.add(code)
            if not code.co_name.startswith("<") and is_of_users_own(code.co_filename):
                found.add(within(frame))

    before = sys.getprofile()
    sys.setprofile(at_an_event)
    try:
        yield found
    finally:
        sys.setprofile(before)
