"""What a user's functions have cached: tables of one dtype are none for another.

A process of ours computes in several dtypes, one after the other, where a training process has one.
Anything else that is cached, as a group or a registry, is made once in a process, and stays.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from sumgrad.subjects.users_line import is_of_users_own
from torch import Tensor

_of_last: list[torch.dtype] = []  # what was computed in last


def forget_those_of_others(dtype: torch.dtype) -> None:
    """Clear functools caches of the user's own modules that hold tables of floating point numbers,
    where another dtype filled them."""
    if _of_last == [dtype]:
        return
    if _of_last:
        for cached in _cached():
            if any(map(_is_table, _results(cached))):
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


def _results(cached: Any) -> Iterator[Any]:
    """What a cache holds: in its dict, or, where its size is bounded, beside it."""
    for held in gc.get_referents(cached):
        yield from held.values() if type(held) is dict else (held,)


def _is_table(result: object) -> bool:
    parts = result if isinstance(result, tuple | list) else (result,)
    return any(isinstance(p, Tensor) and p.is_floating_point() for p in parts)


@functools.cache
def _is_own(name: str, path: object) -> bool:
    del name
    return isinstance(path, str) and is_of_users_own(path)
