"""A limit for work that nobody waits for without end, in whatever thread it runs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLong(Exception):
    """Raised where the work was when its time was over."""

    def __str__(self) -> str:
        return "it was not done in the time that it is given"


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TookTooLong, once, in what runs inside after that time: between two steps of Python, so one
    long call of torch ends first."""
    thread, lock, over = threading.get_ident(), threading.Lock(), threading.Event()

    def interrupt() -> None:
        with lock:
            if not over.is_set():
                kind = ctypes.py_object(TookTooLong)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            over.set()
        timer.cancel()
