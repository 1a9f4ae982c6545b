"""Modules that give their rows in another order than they get them.

Each row is looked for by value among the single process's, going in and coming out: that what comes
out is all there does not say that it stands beside what belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sumgrad.record.trace import INTO, Trace, Traces
from torch import Tensor

CLOSE = 1e-8  # of the largest number
FEWEST = 2  # rows that moved, and calls that keep to their own rows
MOST = 1 << 22  # numbers of a call's rows times rows that they may be


@dataclass(frozen=True, slots=True, kw_only=True)
class Reordered:
    """One call on a rank. gets, gives: of each row, which of the single process's it is."""

    rank: int
    call: int
    gets: tuple[int, ...]
    gives: tuple[int, ...]


def reordered(traces: Traces, module: str) -> list[Reordered]:
    """Calls of a module that give the very rows that they get, in another order. None where some
    call gives other rows than it gets, as one that sorts all rows of a batch does by right, or has
    all rows of one, which may come in another order than there."""
    there_in, there_out = _going_in(traces.single, module), _coming_out(traces.single, module)
    wholes = [*there_out.values()]
    every, found, kept = {len(whole) for whole in wholes}, [], 0
    for rank, trace in traces.ranks.items():
        going_in = _going_in(trace, module)
        for call, gives in _coming_out(trace, module).items():
            if len(gives) in every:
                return []
            gets = _told(going_in.get(call, ()), there_in, len(gives))
            came = _which(gives, wholes)
            if gets is None or came is None:
                continue
            if sorted(gets) != sorted(came):
                return []
            kept += 1
            if sum(a != b for a, b in zip(gets, came, strict=True)) >= FEWEST:
                found.append(Reordered(rank=rank, call=call, gets=gets, gives=came))
    return found if kept >= FEWEST else []


def _going_in(trace: Trace, module: str) -> dict[int, list[Tensor]]:
    """By number of the call, tensors with rows that went in: data, and what modules made."""
    out: dict[int, list[Tensor]] = {}
    for name, (call, _), data in zip(trace.entered, trace.entered_as, trace.data, strict=False):
        if name == module and data.dim():
            out.setdefault(call, []).append(data)
    for made, tensor in zip(trace.calls, trace.outputs, strict=True):
        if made.module == f"{INTO}{module}" and tensor.dim() and not made.recomputed:
            out.setdefault(made.number, []).append(tensor)
    return out


def _coming_out(trace: Trace, module: str) -> dict[int, Tensor]:
    """By number of the call, the first tensor that it gave, where that has rows."""
    return {
        call.number: tensor
        for call, tensor in zip(trace.calls, trace.outputs, strict=True)
        if call.module == module and not call.part and not call.recomputed and tensor.dim() > 1
    }


def _told(
    going_in: Sequence[Tensor], there: dict[int, list[Tensor]], num: int
) -> tuple[int, ...] | None:
    """Which rows go in, by the first tensor that has as many and tells each of them."""
    for at, tensor in enumerate(going_in):
        wholes = [tensors[at] for tensors in there.values() if at < len(tensors)]
        if len(tensor) == num and (found := _which(tensor, wholes)) is not None:
            return found
    return None


def _which(mine: Tensor, wholes: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Of each row, which of those of all calls of the single process it is; None unless each is
    one of them alone."""
    if not wholes or len({w.shape[1:] for w in wholes} | {mine.shape[1:]}) > 1:
        return None
    num = sum(map(len, wholes))
    if not mine.numel() or not num or mine.numel() * num > MOST:
        return None
    whole = torch.cat([*wholes]).reshape(num, -1).double()
    bound = CLOSE * float(whole.abs().max())
    same = (mine.reshape(len(mine), 1, -1).double() - whole).abs().amax(2) <= bound
    return tuple(same.long().argmax(1).tolist()) if bool((same.sum(1) == 1).all()) else None
