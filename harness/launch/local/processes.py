"""Processes below this one: tied to it, adopted when their parents die, and ended for good.

Linux only where the kernel is asked; elsewhere the functions do what they can, or nothing.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
END_S = 5.0  # a process that is dying inside the kernel is waited for this long


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:
            os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, however it was detached."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_children() -> None:
    """Kill and reap every process below this one; adopted orphans too, until none is left."""
    deadline = time.monotonic() + END_S
    while (pids := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in pids:
            kill(pid, signal.SIGKILL)
        reap_children()
        time.sleep(0.002)


def end_tagged(variable: str, value: str) -> None:
    """Kill every other process that was started with this environment variable."""
    tag = f"{variable}={value}".encode()
    deadline = time.monotonic() + END_S
    while (pids := _tagged(tag)) and time.monotonic() < deadline:
        for pid in pids:
            kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _tagged(tag: bytes) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = file.read_bytes().split(b"\0")  # a zombie's is empty
        except OSError:
            continue
        if tag in variables and int(file.parent.name) != os.getpid():
            found.append(int(file.parent.name))
    return found


def reap_children() -> None:
    """Collect every child that has ended already."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def children_of(parent: int) -> list[int]:
    """The living processes and zombies whose parent this is; empty where there is no /proc."""
    threads = list(Path(f"/proc/{parent}/task").glob("*"))
    if all((thread / "children").exists() for thread in threads):  # none: it is gone
        return [int(pid) for thread in threads for pid in _read(thread / "children").split()]
    return [  # a kernel without such lists
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if _read(stat).rpartition(")")[2].split()[1:2] == [str(parent)]
    ]


HELD = "its process was stopped (SIGSTOP, or a debugger); killed by the launcher"


def state_of(pid: int) -> str:
    """How a process's main thread is: R runs, S sleeps, D waits for a disk, T is stopped, t by a
    debugger; ? where the kernel does not say."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[0] if fields else "?"


def seconds_wanted(pid: int) -> float:
    """For how long all threads of a process have had a processor, or waited for one; NaN where the
    kernel keeps no account of it."""
    told = [_read(task / "schedstat").split() for task in Path(f"/proc/{pid}/task").glob("*")]
    return sum(int(t[0]) + int(t[1]) for t in told if len(t) > 1) / 1e9 or math.nan


def kill(pid: int, number: int) -> None:
    """Send a signal, also to one that is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def kill_group(leader: int, number: int) -> None:
    """Send a signal to the process group of a process that leads one."""
    try:
        os.killpg(leader, number)
    except (ProcessLookupError, PermissionError):  # macOS: only zombies are left in it
        return


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
