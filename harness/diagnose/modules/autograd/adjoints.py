"""Which backwards of Functions that communicate are the adjoint of their forward, and which not.

Where ranks compute the same, a step counts one of them: a backward that is off by how many they are
may be meant so, and is told neither right nor wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from sumgrad.record.adjoint import Adjoint
from sumgrad.record.derivative import Derivative, Off
from torch import Tensor

NEAR = 1e-4


def as_derivatives(found: Iterable[Adjoint]) -> Iterator[tuple[int, Derivative]]:
    """Of those that are told, beside the first rank that holds the argument."""
    for one in found:
        slopes = torch.tensor(one.slopes, dtype=torch.float64)
        given = torch.tensor(one.given, dtype=torch.float64).sum(1)
        factor = _factor(slopes.sum(1), given)
        if factor is not None and factor != 1 and _may_be_meant(factor, one):
            continue
        shares = () if factor is not None else _shares(slopes, given)
        yield (
            one.holders[0],
            Derivative(
                function=one.function,
                line=one.line,
                written=one.written,
                call=one.call,
                argument=one.argument,
                agrees=factor == 1,
                off=None if factor is None or factor == 1 else _scaled(factor),
                leaf=one.leaf,
                together=True,
                place=one.place,
                at=one.at,
                shares=tuple(zip(one.ranks, shares, strict=True)) if shares else (),
            ),
        )


def _scaled(factor: float) -> Off:
    return Off(differ=0, numel=0, factors=(factor,))


def _factor(whole: Tensor, given: Tensor) -> float | None:
    """By which all directions are off, 1 where they are not; None where there is none."""
    squares = float((whole * whole).sum())
    factor = float((whole * given).sum()) / squares if squares else 0.0
    scale = max(float(whole.abs().max()), float(given.abs().max()))
    if float((given - whole).abs().max()) <= NEAR * scale:
        return 1.0
    return factor if float((given - factor * whole).abs().max()) <= NEAR * scale else None


def _may_be_meant(factor: float, one: Adjoint) -> bool:
    """Whether it is how many of the ranks may compute the same, or one by that; or a leaf is handed
    nothing, whose gradient the backward may add up itself."""
    if one.leaf and abs(factor) <= NEAR:
        return True
    ranks, holders = len(one.ranks), len(one.holders)
    for often in range(2, ranks + 1):
        near = any(abs(factor - f) <= NEAR * f for f in (often, 1 / often))
        if near and (ranks % often == 0 or often == holders):
            return True
    return False


def _shares(slopes: Tensor, given: Tensor) -> tuple[float, ...]:
    """How often what each rank's results were given is in it, where that can be told apart."""
    if len(slopes) <= slopes.shape[1]:
        return ()
    lengths = slopes.norm(dim=0)
    if not bool((lengths > NEAR * lengths.max()).all()):
        return ()
    columns = slopes / lengths
    values = torch.linalg.svdvals(columns)
    if float(values[-1]) <= NEAR * float(values[0]):
        return ()
    found = torch.linalg.lstsq(columns, given).solution
    if float((columns @ found - given).abs().max()) > NEAR * float(given.abs().max()):
        return ()
    return tuple((found / lengths).tolist())
