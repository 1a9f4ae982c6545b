"""What a value has to be, where that is what the ranks have there together, or what another has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from sumgrad.diagnose.modules.values.numbers import are_enough, telling
from sumgrad.diagnose.modules.wanted.how_apart import ENOUGH, How
from sumgrad.diagnose.modules.wanted.inverses import ROUNDINGS, Needed
from torch import Tensor

TOGETHER: Mapping[str, Callable[[Tensor], Tensor]] = {  # of (ranks, ...) the one over the first
    "sum": lambda held: held.sum(0),
    "mean": lambda held: held.mean(0),
    "largest": lambda held: held.amax(0),
    "smallest": lambda held: held.amin(0),
}


def how_across(held: Sequence[tuple[int, Tensor]], own: int, need: Needed) -> How | None:
    """None where it is none of these. held: of each rank of a group what it has there, in one
    shape; own: the rank whose value it is. Where all have the same, any of these is a factor."""
    values = torch.stack([value.double() for _, value in held])
    known = ~need.value.isnan()
    want = need.value[known].double()
    if not len(want) or not bool(want.isfinite().all()) or bool((values == values[:1]).all()):
        return None
    near = ROUNDINGS * float(want.abs().max())

    def is_wanted(value: Tensor) -> bool:
        return bool(((value[known] - want).abs() <= near).all())

    ranks = tuple(rank for rank, _ in held)
    for way, of in TOGETHER.items():
        if is_wanted(of(values)):
            return How("ranks", way=way, ranks=ranks)
    if are_enough(telling(want)) or need.spare >= ENOUGH:
        for rank, value in zip(ranks, values, strict=True):
            if rank != own and is_wanted(value):
                return How("ranks", ranks=(rank,))
    return None
