"""What became of one parameter's gradient on a rank, line by line, in what the backwards gave it.

Every value that a line takes or gives, and that is a sum of what the ranks' own backwards gave the
parameter, is told by the weights of that sum. So a copy that was overwritten, a buffer that was
divided, a reduction that came too early are seen at the line where the weights change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from sumgrad.diagnose.own_gradients import NEEDED, Columns, Source, near, weights_of
from sumgrad.record.computed import Computation, Computed
from torch import Tensor

CLOSE = 1e-9
NEARLY = 1e-6  # of a value: what such sums may be off, to be fitted at all
ASKS = {"numel", "nelement", "size", "dim", "stride", "is_contiguous", "data_ptr"}  # no numbers
OVERWRITES = {"copy"}  # what they take first, unread
MOST_BUFFERS = 64  # tensors, larger than the parameter, in which it is looked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A line of a rank that takes, or else gives, this much of the parameter's gradient.

    weights: (sources, passes), of what each source's own backwards gave. elements: of the value,
    from where to where; None where it is all of it.
    """

    computation: Computation
    gives: bool
    weights: Tensor
    elements: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """In order; what is held one after the other with the same weights is there once. end: the
    weights that the rank ends with, None where it is no such sum. runs: see Columns.
    """

    name: str
    rank: int
    sources: tuple[Source, ...]
    held: tuple[Held, ...]
    end: Tensor | None = None
    runs: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether the weights change between the lines, or behind the last."""
        if len(self.held) != 1:
            return bool(self.held)
        return self.end is None or not near(self.end, self.held[0].weights)


def multiplied_in(history: History) -> dict[Computation, list[float]]:
    """By the first of the computations of a line, the factors by which it changed the gradient."""
    found: dict[tuple[str, str, str], tuple[Computation, list[float]]] = {}
    for before, after in pairwise(history.held):
        factor = _factor(before.weights, after.weights)
        if after.gives and factor is not None:
            c = after.computation
            found.setdefault((c.line, c.function, c.part), (c, []))[1].append(factor)
    return {c: factors for c, factors in found.values()}


def _factor(before: Tensor, after: Tensor) -> float | None:
    factor = float((before * after).sum() / (before * before).sum())
    return factor if factor and near(after, factor * before) else None


def history_of(columns: Columns, computed: Computed) -> History:
    """Nothing is held where there are too few numbers to tell the weights of so many backwards."""
    few = columns.own.shape[1] < NEEDED * len(columns.own)
    held: list[Held] = []
    if not few and weights_of([columns], zeros=True).only:
        for one in _held(columns, computed):
            if not held or not near(held[-1].weights, one.weights):
                held.append(one)
    return History(
        name=columns.cell.name,
        rank=columns.cell.rank,
        sources=columns.sources,
        held=tuple(held),
        end=_weights(columns, columns.measured),
        runs=columns.runs,
    )


def _held(columns: Columns, computed: Computed) -> Iterator[Held]:
    numel, basis = columns.cell.measured.numel(), torch.linalg.qr(columns.own.T).Q
    starts: dict[int, int | None] = {}  # by number of elements, where it begins in such a buffer
    known: dict[int, Tensor | None] = {}
    for c in computed.in_order():
        if c.function in ASKS:
            continue
        taken = c.uses[1:] if c.function in OVERWRITES else c.uses
        for number, gives in (*((n, False) for n in taken), *((n, True) for n in c.gives)):
            value = computed.values[number]
            if not value.is_floating_point() or value.numel() < numel:
                continue
            size = value.numel()
            if size > numel and size not in starts and len(starts) < MOST_BUFFERS:
                start = _start(columns, value.reshape(-1).double())
                if start is not None:
                    starts[size] = start
            at = 0 if size == numel else starts.get(size)
            if at is None:
                continue
            if number not in known:
                here = value.reshape(-1)[at : at + numel].double()[columns.place]
                left = here - basis @ (basis.T @ here)
                may_be = float(left.norm()) <= NEARLY * float(here.norm())
                known[number] = _weights(columns, here) if may_be else None
            weights = known[number]
            if weights is not None:
                elements = None if size == numel else (at, at + numel)
                yield Held(computation=c, gives=gives, weights=weights, elements=elements)


def _start(columns: Columns, flat: Tensor) -> int | None:
    """Where a buffer has what some of the rank's own backwards gave, or they together."""
    own = _own(columns)
    sums = [*own, *own.cumsum(0)[1:]]
    for column in sums:
        j = int(column.abs().argmax())
        wanted = float(column[j])
        if not wanted:
            continue
        for i in (flat - wanted).abs().le(CLOSE * abs(wanted)).nonzero()[:, 0].tolist():
            start = i - int(columns.place[j])
            if start < 0 or start + columns.cell.measured.numel() > len(flat):
                continue
            there = flat[start + columns.place]
            if float((there - column).abs().max()) <= CLOSE * abs(wanted):
                return start
    return None


def _own(columns: Columns) -> Tensor:
    """(passes, n) what its own backwards gave."""
    mine = [columns.cell.rank in source for source in columns.sources]
    return columns.own.reshape(len(mine), columns.passes, -1)[mine.index(True)]


def _weights(columns: Columns, value: Tensor) -> Tensor | None:
    """(sources, passes) of what stands at its places; None where it is no sum of what the
    backwards gave, or is of nothing."""
    if not bool(value.any()) or not bool(torch.isfinite(value).all()):
        return None
    found = weights_of([replace(columns, measured=value)], zeros=True)
    if found.got is None or not found.only or not bool(found.got.any()):
        return None
    return found.got.reshape(len(columns.sources), columns.passes)
