"""What a user's functions have cached: tables of one dtype are none for another.

A process of ours computes in several dtypes, one after the other, where a training process has one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from sumgrad.subjects.users_line import is_of_users_own

_of_last: list[torch.dtype] = []  # what was computed in last


def forget_those_of_others(dtype: torch.dtype) -> None:
    """Clear every functools cache of the user's own modules, where another dtype filled it."""
    if _of_last == [dtype]:
        return
    if _of_last:
        for cached in _cached():
            cached.cache_clear()
    _of_last[:] = [dtype]


def _cached() -> Iterator[Any]:
    """Of a module, and of its classes."""
    for name, module in [*sys.modules.items()]:
        if not _is_own(name, getattr(module, "__file__", None)):
            continue
        held = [*vars(module).values()]
        inner = [v for cls in held if isinstance(cls, type) for v in vars(cls).values()]
        plain = [getattr(v, "__func__", v) for v in (*held, *inner)]  # of static and class methods
        yield from (v for v in plain if isinstance(v, functools._lru_cache_wrapper))


@functools.cache
def _is_own(name: str, path: object) -> bool:
    del name
    return isinstance(path, str) and is_of_users_own(path)
