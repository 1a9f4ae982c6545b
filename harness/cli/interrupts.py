"""Signals that end a command: one line, no traceback, exit code 128 + n, and nobody left behind.

The handler ends the process where it stands. An exception would be swallowed where Python ignores
them (in finalisers, in imports of extensions), and the command would go on to its last line.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = "\x1b[?25h"
_closers: list[Callable[[], None]] = []


def install() -> None:
    """End this process on any of SIGNALS; what was ignored from the start (nohup) stays so."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


@contextmanager
def closed_on_signal(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` before a signal ends this process. It may run in the middle of anything."""
    _closers.append(close)
    try:
        yield
    finally:
        _closers.remove(close)


def _end(number: int, _: FrameType | None) -> None:
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    try:
        for close in reversed(_closers):
            close()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            cursor = SHOW_CURSOR if os.isatty(2) else ""
            name = signal.Signals(number).name
            ended = "every rank was ended, no verdict was shown"
            line = f"{cursor}sumgrad: interrupted by {name}; {ended}\n"
            os.write(2, line.encode())
    finally:
        os._exit(128 + number)
