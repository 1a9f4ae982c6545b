"""A parameter that several lines use: how often what each of them gave is counted, over all ranks.

What a rank has, and what it must have, are held against the sums over ranks of what each use gave.
Where both are made of these, and not with the same weights, the use is known that is counted
wrongly, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from sumgrad.diagnose.own_gradients import ALIKE, NEEDED, Columns, columns_of, near, weights_of
from sumgrad.judge.cells import Cell
from sumgrad.record.trace import Trace
from sumgrad.record.uses import Use
from torch import Tensor

MOST_GUESSED = 4  # uses of which the weights are guessed, where there are too few numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One use of a parameter. times: how often it is counted for each time that it should be; None
    where it should not be at all. alike: all ranks gave the same."""

    use: Use
    times: float | None
    alike: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ByUse:
    """A wrong parameter of a rank. ranks: that have a part of its gradient. is_fit: the weights
    were fitted, to many more numbers; else they are the only ones of a few that do it."""

    name: str
    rank: int
    ranks: tuple[int, ...]
    counted: tuple[Counted, ...]
    is_fit: bool


def counted_by_use(cell: Cell, traces: Mapping[int, Trace], scale: float | None) -> ByUse | None:
    """None where its uses are not known, or are all counted alike, or all wrongly.

    scale: how often the sum over ranks is what it must be, in parameters that are right; None where
    that is not known.
    """
    parts = _parts(cell, traces)
    if parts is None:
        return None
    uses, gave, at = parts
    whole = torch.stack([sum(own.values(), torch.zeros(len(at)).double()) for own in gave])
    columns = columns_of(cell, {cell.rank: ({cell.name: whole}, {cell.name: at})})
    ranks = sorted({rank for own in gave for rank in own})
    if columns is None or len(ranks) < 2:
        return None
    is_fit = columns.own.shape[1] >= NEEDED * len(uses)
    found = _fitted(columns) if is_fit else _guessed(columns, len(ranks), scale)
    if found is None:
        return None
    times = [_times(float(a), float(b)) for a, b in zip(*found, strict=True)]
    if all(t == 1 for t in times) or not any(t == 1 for t in times):
        return None
    return ByUse(
        name=cell.name,
        rank=cell.rank,
        ranks=tuple(ranks),
        counted=tuple(
            Counted(use=use, times=t, alike=len(own) == len(ranks) and _are_alike([*own.values()]))
            for use, t, own in zip(uses, times, gave, strict=True)
        ),
        is_fit=is_fit,
    )


def _parts(
    cell: Cell, traces: Mapping[int, Trace]
) -> tuple[list[Use], list[dict[int, Tensor]], Tensor] | None:
    """Its uses, what each gave by rank, and which elements these are; None where ranks kept others,
    or have another part of it."""
    found: dict[Use, dict[int, Tensor]] = {}
    common: Tensor | None = None
    for rank, trace in traces.items():
        for use, gave in trace.uses.get(cell.name, {}).items():
            at = trace.own_at[cell.name][: len(gave)]
            if common is not None and not torch.equal(at, common):
                return None
            common = at
            found.setdefault(use, {})[rank] = gave
    if common is None or len(found) < 2:
        return None
    return [*found], [*found.values()], common


def _fitted(columns: Columns) -> tuple[Tensor, Tensor] | None:
    found = weights_of([columns])
    if found.got is None or found.wanted is None or not found.only:
        return None
    return found.got, found.wanted


def _guessed(columns: Columns, ranks: int, scale: float | None) -> tuple[Tensor, Tensor] | None:
    """Each use once, as often as there are ranks, one by that, or not at all; None where no such
    weights give what is there, or several do."""
    if scale is None or len(columns.own) > MOST_GUESSED:
        return None
    found = []
    for target in (columns.measured, columns.wanted):
        bound = max(columns.cell.wanted.threshold, ALIKE**2 * float(target.abs().max()))
        every = product((1.0, 1 / ranks, float(ranks), 0.0), repeat=len(columns.own))
        tried = (scale * torch.tensor(often, dtype=torch.float64) for often in every)
        fitting = [w for w in tried if float((w @ columns.own - target).abs().max()) <= bound]
        if len(fitting) != 1:
            return None
        found += fitting
    return found[0], found[1]


def _times(got: float, wanted: float) -> float | None:
    if not wanted:
        return 1.0 if not got else None
    times = got / wanted
    return 1.0 if abs(times - 1) <= ALIKE else times


def _are_alike(parts: list[Tensor]) -> bool:
    return all(near(part, parts[0]) for part in parts[1:])
