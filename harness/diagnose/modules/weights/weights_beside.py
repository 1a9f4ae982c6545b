"""A matrix whose columns are not those of the features that stand beside them.

A cut of a projection that has several parts, as heads beside an MLP's, must take of each part what
the rank has of it. Both are found by value: which features of the single process's input a rank
has, and which columns of its matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.record.computed import MODULE, Computation, Computed
from torch import Tensor

MOST_ALIKE = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Misplaced:
    """features, columns: of the whole ones, those that a rank's have, in its order; of `width`."""

    rank: int
    mine: Computation
    features: tuple[int, ...]
    columns: tuple[int, ...]
    width: int


def misplaced_weights(rank: int, mine: Computed, whole: Computed) -> Iterator[Misplaced]:
    """Of a rank's products with a matrix, in order."""
    there = Numbers(whole.values)
    for c in mine.computations:
        pair = _pair(c, mine)
        if pair is None:
            continue
        x, weight = pair
        for w in whole.computations:
            other = _pair(w, whole)
            if other is None or other[1] not in there.holding(mine.values[weight]):
                continue
            if other[0] not in there.holding(mine.values[x]):
                continue
            features = _last_places(there, mine.values[x], whole, other[0])
            columns = _last_places(there, mine.values[weight], whole, other[1])
            if features is None or columns is None:
                continue
            if bool((features != columns).any()):
                yield Misplaced(
                    rank=rank,
                    mine=c,
                    features=tuple(features.tolist()),
                    columns=tuple(columns.tolist()),
                    width=whole.values[other[0]].shape[-1],
                )
            break


def _pair(c: Computation, computed: Computed) -> tuple[int, int] | None:
    """What goes into a linear map, and its matrix of (out, in): numbers of values."""
    if (c.function != "linear" and not c.function.startswith(MODULE)) or len(c.takes) < 2:
        return None
    x, weight = c.takes[:2]
    if not isinstance(x, int) or not isinstance(weight, int):
        return None
    a, b = computed.values[x], computed.values[weight]
    if b.dim() != 2 or not a.dim() or a.shape[-1] != b.shape[1] or a.dtype != torch.float64:
        return None
    return x, weight


def _last_places(there: Numbers, value: Tensor, whole: Computed, number: int) -> Tensor | None:
    """(c,) the place in the whole one's last dimension of each of a value's; None where it is not
    one for each."""
    found = there.places(value, number)
    if found is None:
        return None
    told, place = found
    mine, theirs = told % value.shape[-1], place % whole.values[number].shape[-1]
    out = torch.full((value.shape[-1],), -1)
    out[mine] = theirs
    if bool((out < 0).any()) or bool((out[mine] != theirs).any()):
        return None
    return out
