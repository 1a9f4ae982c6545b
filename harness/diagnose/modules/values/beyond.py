"""Outputs that go on beyond an end of the single process's: a stretch with more than there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.values.matching import match, vectors
from sumgrad.diagnose.modules.values.seen import TOLERANCES, Seen
from sumgrad.record.trace import Call, Trace, Traces
from torch import Tensor

MOST, FEWEST = 4, 2  # places beyond the end, and others


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """In a call, along a dimension: so many first places, `before`, or else last ones that the
    single process has not; all others are those with which it begins there, or ends. size: of all.
    """

    rank: int
    call: int
    dim: int
    before: bool
    places: int
    size: int


def beyond_the_ends(traces: Traces, seen: Sequence[Seen], dtype: str) -> Iterator[Beyond]:
    """Of calls where something counts in the loss beyond an end."""
    tolerance = TOLERANCES.get(dtype)
    for s in seen if tolerance is not None else ():
        output, gradient = (traces.ranks[s.rank].output_of(s.call),
                            traces.ranks[s.rank].gradient_of(s.call))  # fmt: skip
        if gradient is None or tolerance is None:
            continue
        for dim in range(1, output.dim()):
            told = _beyond(
                _along(output, dim), _along(gradient, dim), _there(traces.single, s.call, dim),
                tolerance,
            )  # fmt: skip
            if told is not None:
                before, places = told
                yield Beyond(rank=s.rank, call=s.call.number, dim=dim, before=before,
                             places=places, size=output.shape[dim])  # fmt: skip
                break


def _along(tensor: Tensor, dim: int) -> Tensor:
    """(n, size) of what stands along a dimension."""
    return vectors(tensor.movedim(dim, -1))


def _there(single: Trace, call: Call, dim: int) -> Tensor:
    """(N, size) the same of all calls in the single process; none where they are of several."""
    found = [
        _along(output, dim)
        for other, output in zip(single.calls, single.outputs, strict=True)
        if (other.module, other.part) == (call.module, call.part) and output.dim() > dim
    ]
    return torch.cat(found) if len({len(t[0]) for t in found if len(t)}) == 1 else torch.zeros(0, 0)


def _beyond(
    got: Tensor, reached: Tensor, there: Tensor, tolerance: float
) -> tuple[bool, int] | None:
    """Whether before the beginning, and how many places; the fewest."""
    size, full = got.shape[1], there.shape[1]
    for n in range(1, min(MOST, size - FEWEST) + 1):
        own = size - n
        for before, inner, its, counts in (
            (True, got[:, n:], there[:, :own], reached[:, :n]),
            (False, got[:, :own], there[:, full - own :], reached[:, own:]),
        ):
            where = match(inner, its, tolerance) if bool(counts.any()) else None
            if where is not None and bool(where.found.any(1).all()):
                return before, n
    return None
