"""What malloc does with freed memory: kept where it is needed again, given back where it is not."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks here
    fcntl = None  # type: ignore[assignment]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
TRIM_ABOVE = 128 << 20


def keep_freed_memory() -> None:
    """Have malloc use large blocks again that were freed, instead of pages that the kernel clears.

    A fifth of a large model's time; the process holds more or less what it once needed at most.
    """
    with contextlib.suppress(AttributeError, OSError):  # glibc's; others have another malloc
        malloc = ctypes.CDLL(None)
        malloc.mallopt(_M_MMAP_MAX, 0)
        malloc.mallopt(_M_TRIM_THRESHOLD, TRIM_ABOVE)


def give_back_memory() -> None:
    """Give back what is free now, after a phase that needed more than the next one will."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def one_at_a_time(patience_s: float = 60.0, file: str = __file__) -> Iterator[None]:
    """What needs most memory, by one process at a time; after some patience anyway. file: which all
    of them can open; nothing is written."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                held = os.open(file, os.O_RDONLY)
                stack.callback(os.close, held)
                deadline = time.monotonic() + patience_s
                while not _locked(held) and time.monotonic() < deadline:
                    time.sleep(0.02)
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def available_memory() -> int | None:
    """Bytes that new processes can have without swapping; None where nobody says."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def kills_for_want_of_memory() -> int:
    """How many processes Linux has ended since its start because memory ran out; 0 elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
