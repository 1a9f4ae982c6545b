"""How many files a process may have open: a rank has a connection to every other one."""

from __future__ import annotations

import contextlib

try:
    import resource
except ImportError:  # no such limits here
    resource = None  # type: ignore[assignment]

OWN, FOR_EACH_RANK = 30, 2  # measured: 36 of ten ranks, 139 of 56
MOST = 1 << 16


def allow_open_files() -> None:
    """As many as this process may ask for, also for those that it starts."""
    if resource is None:
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if most == resource.RLIM_INFINITY else min(most, MOST)
    if now != resource.RLIM_INFINITY and now < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def too_few_files(num_ranks: int) -> str | None:
    """In words, if so many ranks cannot have the files open that they need."""
    if resource is None:
        return None
    most, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], OWN + FOR_EACH_RANK * num_ranks
    if most == resource.RLIM_INFINITY or most >= needed:
        return None
    return (
        f"each of {num_ranks} ranks needs about {needed} open files, and the hard limit is {most} "
        f"(ulimit -Hn): raise it, or use fewer ranks"
    )
