"""Pairs of whole numbers, as the edges of a graph, that stand twice in what enters a module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Twice:
    """Of what a call is handed as `name`, the pairs that stand there more than once. made: the line
    that made it, where it is a user's."""

    call: int
    name: str
    pairs: tuple[tuple[int, int], ...]
    made: Line


def pairs_twice(mine: Trace, single: Trace, module: str) -> Iterator[Twice]:
    """By call, where no pair stands twice there in the single process."""
    once: dict[str, bool] = {}
    for _, name, data, _ in _handed(single, module):
        once[name] = once.get(name, True) and not _repeated(data)
    for call, name, data, made in _handed(mine, module):
        pairs = _repeated(data) if once.get(name, False) else ()
        if pairs:
            yield Twice(call=call, name=name, pairs=pairs, made=made)


def _handed(trace: Trace, module: str) -> Iterator[tuple[int, str, Tensor, Line]]:
    """The call, the name, (2, n) pairs, and the line that made them."""
    for of, (call, name), data, made in zip(
        trace.entered, trace.entered_as, trace.data, trace.entered_at, strict=False
    ):
        whole = not data.is_floating_point() and data.dtype != torch.bool
        if of == module and whole and data.dim() == 2 and data.shape[0] == 2 < data.shape[1]:
            yield call, name, data, made


def _repeated(data: Tensor) -> tuple[tuple[int, int], ...]:
    pairs, often = data.unique(dim=1, return_counts=True)
    return tuple((int(a), int(b)) for a, b in pairs.T[often > 1].tolist())
