"""A reduction that adds different parts of one parameter, element by element, as if they were one.

Ranks that hold other rows, heads or experts of a parameter have gradients of the same shape, and a
wrong group adds them up. What a rank has is then a sum of what ranks' own backwards gave, in the
order of their own elements and not of the whole parameter's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case, fails
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.fit import fit_deviation
from sumgrad.diagnose.own_gradients import Given, given_by_ranks
from sumgrad.judge.cells import Cell
from torch import Tensor

WHOLE = 1e-6  # weights are whole numbers to this
SPARE = 2  # elements more than weights, or any sum fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """What a rank holds is the sum of these ranks' own gradients; alike: those of the same part."""

    cell: Cell
    ranks: tuple[int, ...]
    alike: tuple[int, ...]


def other_parts_were_added(case: Case, left: Left) -> Iterator[Explanation]:
    """All that is wrong are sums over ranks which hold other parts of it."""
    given = given_by_ranks(case)
    if given is None:
        return
    found = [_summed(cell, given) for cell in case.failing_cells]
    told = [one for one in found if one is not None]
    if not told or len(told) < len(found):
        return
    names = list(dict.fromkeys(one.cell.name for one in told))
    shown = list(dict.fromkeys(
        f"rank {one.cell.rank} holds the sum of what the backwards of rank {spans(one.ranks)} "
        f"gave; the same part of it is on rank {spans(one.alike)}"
        for one in told
    ))  # fmt: skip
    yield explained(
        case,
        Diagnosis(
            cause=f"{some_of(names)}: ranks that hold different parts of it are added up, element "
            f"by element: the group of its reduction is not that of the ranks with the same part",
            kind="other_parts",
            ranks=tuple(sorted({one.cell.rank for one in told})),
            because=(*shown, "so added up is what each holds, within the threshold"),
            standing="proved",
        ),
    )


def _summed(cell: Cell, given: Given) -> Summed | None:
    """None unless it is a sum, each once, in which some rank has another part."""
    own, at = _own(given, cell.rank, cell.name)
    if own is None or at is None or cell.index is None:
        return None
    flat = cell.index.reshape(-1)
    order = flat.argsort()
    places = torch.searchsorted(flat[order], at)
    if int(places.max()) >= len(flat) or not torch.equal(flat[order[places]], at):
        return None
    held = {rank: _own(given, rank, cell.name) for rank in given}
    ranks = [r for r, (o, _) in held.items() if o is not None and o.shape == own.shape]
    alike = [r for r in ranks if torch.equal(held[r][1], at)]  # type: ignore[arg-type]
    target = cell.measured.reshape(-1)[order[places]]
    columns = [o for r in ranks if (o := held[r][0]) is not None]
    if len(alike) == len(ranks) or len(target) < len(ranks) + SPARE:
        return None
    fit = fit_deviation(columns, target)
    if any(value is None for value in fit.values):
        return None
    weights = [value - 1 for value in fit.values if value is not None]
    often = [round(w) for w in weights]
    if any(abs(w - n) > WHOLE for w, n in zip(weights, often, strict=True)):
        return None
    added = [r for r, n in zip(ranks, often, strict=True) if n == 1]
    total = sum((c for c, n in zip(columns, often, strict=True) if n), torch.zeros_like(target))
    if {*often} - {0, 1} or set(added) <= set(alike) or cell.rank not in added:
        return None
    wide = torch.zeros(cell.measured.numel(), dtype=torch.float64)
    wide[order[places]] = target - total
    return None if fails(cell, wide.reshape(cell.measured.shape), factor=2) else Summed(
        cell=cell, ranks=tuple(added), alike=tuple(alike)
    )  # fmt: skip


def _own(given: Given, rank: int, name: str) -> tuple[Tensor | None, Tensor | None]:
    """What a rank's backwards gave a parameter in all, and which elements of it these are."""
    gradients, places = given[rank]
    own, at = gradients.get(name), places.get(name)
    if own is None or at is None or own.dim() != 2 or own.shape[1:] != at.shape:
        return None, None
    return own.double().sum(0), at
