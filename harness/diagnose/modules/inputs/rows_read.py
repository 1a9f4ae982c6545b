"""Which rows of the full batch each rank read, from the data that entered its modules."""

from __future__ import annotations

from collections import Counter

import torch
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.trace import Trace, Traces
from torch import Tensor

FEWEST_VALUES = 3  # different numbers in a tensor that tells rows apart


def rows_read(traces: Traces, *, counted: bool = False) -> dict[int, Counter[int]] | None:
    """Rank -> row -> how often it entered the first module that they enter in one process.

    counted: only in calls that a gradient reached, where others of that module have none. None
    where the data of some rank cannot be told.
    """
    told = _told(traces, counted=counted)
    return None if told is None else told[2]


def calls_of_rows(traces: Traces) -> dict[int, dict[int, set[int]]]:
    """Rank -> row -> the calls in which it enters that module; empty where that is not told."""
    told = _told(traces)
    if told is None:
        return {}
    module, whole, _ = told
    out: dict[int, dict[int, set[int]]] = {}
    for rank, trace in traces.ranks.items():
        for name, data, (call, _) in zip(trace.entered, trace.data, trace.entered_as, strict=False):
            for row in (_found(data, whole) or ()) if name == module else ():
                out.setdefault(rank, {}).setdefault(row, set()).add(call)
    return out


def _told(
    traces: Traces, *, counted: bool = False
) -> tuple[str, Tensor, dict[int, Counter[int]]] | None:
    """The first module that all rows enter in one process and that tells those of every rank, the
    field whose rows these are, and which each rank has how often."""
    for whole in (traces.single.batch or {}).values():
        if whole.dim() < 2 or len({_key(row) for row in whole}) < len(whole):
            continue  # rows that are alike
        if len(whole.unique()) < FEWEST_VALUES:
            continue  # a mask: any stretch of ones is like another
        for module in dict.fromkeys(traces.single.entered):
            if set(_rows_of(traces.single, module, whole)) != set(range(len(whole))):
                continue
            found = {
                rank: _rows_of(trace, module, whole, counted=counted)
                for rank, trace in traces.ranks.items()
            }
            told = {rank: own for rank, own in found.items() if own}
            silent = [r for r in found if r not in told and module in traces.ranks[r].entered]
            if told and not silent:
                return module, whole, told
    return None


def rows_through(look: Look) -> dict[str, dict[int, Counter[int]]]:
    """Module -> rank -> row -> how often its output was of it, of what a gradient reached."""
    out: dict[str, dict[int, Counter[int]]] = {}
    for module in look.modules:
        calls = [s for s in look.seen[module] if s.call.part == 0 and not s.call.recomputed
                 and s.call.operation_back is not None]  # fmt: skip
        if not calls or any(s.shifted for s in look.seen[module]):
            continue
        if any(s.rows is None or bool((s.rows == -1).any()) for s in calls):
            continue
        found = out.setdefault(module, {})
        for s in calls:
            assert s.rows is not None
            found.setdefault(s.rank, Counter()).update(set(s.rows.tolist()))
    return out


def _rows_of(trace: Trace, module: str, whole: Tensor, *, counted: bool = False) -> Counter[int]:
    found: Counter[int] = Counter()
    without = _calls_without_a_gradient(trace, module) if counted else set()
    calls = [number for number, _ in trace.entered_as] or [-1] * len(trace.data)
    for name, data, number in zip(trace.entered, trace.data, calls, strict=True):
        if name == module and number not in without:
            found.update(_found(data, whole) or ())
    return found


def _calls_without_a_gradient(trace: Trace, module: str) -> set[int]:
    """Those of a module whose outputs none reached; nothing where it reached none of any."""
    numbers: dict[int, bool] = {}
    for call, gradient in zip(trace.calls, trace.gradients, strict=True):
        if call.module == module and not call.recomputed:
            numbers[call.number] = numbers.get(call.number, False) or gradient is not None
    return {n for n, reached in numbers.items() if not reached} if any(numbers.values()) else set()


def _found(data: Tensor, whole: Tensor) -> list[int] | None:
    """The rows of `whole` that these are, whole or the same stretch of each."""
    if data.dim() != whole.dim() or data.shape[2:] != whole.shape[2:] or not len(data):
        return None
    width = data.shape[1]
    if width > whole.shape[1] or data.dtype.is_floating_point != whole.dtype.is_floating_point:
        return None
    for start in range(whole.shape[1] - width + 1):
        known = {_key(row): i for i, row in enumerate(whole[:, start : start + width])}
        if len(known) < len(whole):
            continue  # stretches that are alike
        rows = [known.get(_key(row)) for row in data.to(whole.dtype)]
        if all(row is not None for row in rows):
            return [row for row in rows if row is not None]
    return None


def _key(row: Tensor) -> bytes:
    return row.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
