"""What other code in a step must not do: write, remove or move files, start processes, connect."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Audit events, as Python tells them before it does it.
OUTSIDE = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
           "os.chmod", "os.chown", "os.utime", "os.system", "os.exec", "os.posix_spawn", "os.fork",
           "os.forkpty", "os.kill", "os.killpg", "subprocess.Popen", "socket.connect",
           "socket.bind", "socket.sendto", "socket.sendmsg", "shutil.")  # fmt: skip
_HOOKED: list[bool] = []  # whether, and whether it is on


class NotHere(OSError):
    """Other code was about to do something outside of its process."""


@contextlib.contextmanager
def kept_from_outside(*, files_grow: bool = False) -> Iterator[None]:
    """Between `with` and its end. A file grows for nobody then, whatever writes into it, and this
    process's ledger must not; unless files_grow, as a store of ranks that make groups."""
    if not _HOOKED:
        _HOOKED.append(False)
        sys.addaudithook(_hook)  # for good: there is no way to take one back
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = torch._C.PyTorchFileWriter  # which opens files below Python
    try:
        torch._C.PyTorchFileWriter = _no_writer  # type: ignore[assignment, misc]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if files_grow else 0, hard))
        _HOOKED[0] = True
        yield
    finally:
        _HOOKED[0] = False
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        torch._C.PyTorchFileWriter = writer  # type: ignore[misc]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if not _HOOKED[0]:
        return
    if event == "open":
        path, mode, flags = args
        writes = isinstance(flags, int) and flags & WRITES
        if writes and path != os.devnull:
            raise NotHere(f"other code was about to write {path!r} ({mode})")
    elif event.startswith(OUTSIDE):
        raise NotHere(f"other code was about to do {event}")


def _no_writer(*args: Any, **kwargs: Any) -> Any:
    raise NotHere("other code was about to write a file")


def with_less_memory(more: int) -> None:
    """This process takes at most so many bytes more than it has."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/status", encoding="utf-8") as status:
            held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (held + more, hard))
