"""Where numbers of one process's values stand among those of another's, by value alone.

In float64, where equal numbers are no chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from sumgrad.record.ranks import sample_of
from torch import Tensor

CLOSE = 1e-9  # of the number itself
FEWEST = 3  # different numbers: fewer are found by chance
FEWEST_LONG = 2  # of those that have more digits than what people write
ROUND = 5040 * 1024  # what people write times this is whole
SAMPLES = 8
MOST_SLICES = 32  # that a value may be, of which each is looked at
MOST_COMPARED = 1 << 24  # elements of one rank, seconds of work; what comes later is not told
LOOKED_AT = 64  # elements of a tensor, for as many samples
MOST_AGAIN = 512  # elements whose numbers come again, and are looked for everywhere
MOST_ASKED = 8191  # elements of a tensor that are looked for, wherever they are


class Numbers:
    """All float64 numbers of the values of one process, in order."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = values
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}
        self._room = MOST_COMPARED
        floats = [(i, v.reshape(-1)) for i, v in enumerate(values) if v.dtype == torch.float64]
        numbers = [f for _, f in floats] or [torch.empty(0, dtype=torch.float64)]
        owners = [torch.full((len(f),), i) for i, f in floats] or [torch.empty(0, dtype=torch.long)]
        self._numbers, order = torch.cat(numbers).sort()
        self._owners = torch.cat(owners)[order]

    def holding(self, value: Tensor) -> frozenset[int]:
        """The numbers of values that have a sample of these, if they tell anything."""
        if value.dtype != torch.float64:
            return frozenset()
        flat = value.reshape(-1)
        sample = telling(flat[sample_of(len(flat), LOOKED_AT)])
        sample = sample if are_enough(sample) else telling(flat)
        if not are_enough(sample):
            return frozenset()
        sample = sample[sample_of(len(sample), SAMPLES)]
        width = CLOSE * sample.abs()
        low = torch.searchsorted(self._numbers, sample - width).tolist()
        high = torch.searchsorted(self._numbers, sample + width).tolist()
        held = frozenset(self._owners[low[0] : high[0]].tolist())
        for start, end in zip(low[1:], high[1:], strict=True):
            held &= frozenset(self._owners[start:end].tolist())
            if not held:
                break
        return held

    def places(self, value: Tensor, number: int) -> tuple[Tensor, Tensor] | None:
        """(n,) which elements of a value, and (n,) which of the whole one they are; None unless
        all are there. Of numbers that stand there several times only those that are told by the
        others: in a slice of it."""
        found = self._ranges(value, number)
        if found is None or bool((found[0] == found[1]).any()):
            return None
        at, end, order = found
        flat = value.reshape(-1)
        told = (end - at == 1).nonzero().reshape(-1)
        if not are_enough(flat[told].unique()):
            every = _as_the_only_slice(value, self._values[number], found)
            return None if every is None else (torch.arange(len(flat)), every)
        there = order[at[told]]
        if len(told) < len(flat):
            every = _as_a_slice(value, self._values[number], told, there)
            if every is not None:
                return torch.arange(len(flat)), every
        return told, there

    def again(
        self, value: Tensor, number: int, elements: Tensor, asked: Tensor
    ) -> Iterator[tuple[int, Tensor]]:
        """Of (n,) elements of a value those that are asked for, (n,), and whose number is in the
        whole one more than once: which of the n it is, and where in the whole one it stands."""
        found = self._ranges(value, number) if bool(asked.any()) else None
        if found is None:
            return
        at, end, order = found
        times = (end - at)[elements]
        for k in (asked & (times > 1)).nonzero().reshape(-1).tolist()[:MOST_AGAIN]:
            element = elements[k]
            yield k, order[at[element] : end[element]]

    def unknown(self, value: Tensor) -> int | None:
        """How many of its different numbers, of up to MOST_ASKED, are none of any value here; None
        where they are too few to tell anything."""
        found = self._unknown(value)
        return None if found is None else int(found.sum())

    def share_unknown(self, value: Tensor) -> float | None:
        """The same of each that is asked for, 0 to 1."""
        found = self._unknown(value)
        return None if found is None else float(found.double().mean())

    def _unknown(self, value: Tensor) -> Tensor | None:
        """(n,) bool: of its different numbers."""
        if value.dtype != torch.float64:
            return None
        flat = value.reshape(-1)
        sample = telling(flat[sample_of(len(flat), MOST_ASKED)])
        if len(sample) < FEWEST:
            return None
        width = CLOSE * sample.abs()
        low = torch.searchsorted(self._numbers, sample - width)
        return low == torch.searchsorted(self._numbers, sample + width, right=True)

    def how_many(self, number: int) -> int:
        """Elements of a whole value."""
        return self._values[number].numel()

    def has_all(self, value: Tensor, number: int) -> bool:
        found = self._ranges(value, number)
        return found is not None and bool((found[0] < found[1]).all())

    def _ranges(self, value: Tensor, number: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """(n,) from where and to where each element stands among the sorted ones of a whole value,
        and (N,) which elements those are; None where that is too much work."""
        self._room -= value.numel()
        if self._room < 0:
            return None
        if number not in self._sorted:
            self._sorted[number] = self._values[number].reshape(-1).sort()
        numbers, order = self._sorted[number]
        flat = value.reshape(-1)
        at = torch.searchsorted(numbers, flat - CLOSE * flat.abs())
        end = torch.searchsorted(numbers, flat + CLOSE * flat.abs(), right=True)
        return at, end, order


def _as_a_slice(value: Tensor, whole: Tensor, told: Tensor, there: Tensor) -> Tensor | None:
    """(n,) which elements of the whole one all of a value's are, where it is a slice of it with
    steps of one, as its first element that is told says; else None."""
    if value.dim() != whole.dim():
        return None
    mine = torch.unravel_index(told[0], value.shape)
    its = torch.unravel_index(there[0], whole.shape)
    starts = [int(beyond - here) for here, beyond in zip(mine, its, strict=True)]
    sizes = [*zip(starts, value.shape, whole.shape, strict=True)]
    if any(not 0 <= start <= all_of - n for start, n, all_of in sizes):
        return None
    cut = tuple(slice(start, start + n) for start, n, _ in sizes)
    same = (value == whole[cut]) | ((value - whole[cut]).abs() <= CLOSE * whole[cut].abs())
    if not bool(same.all()):
        return None
    return torch.arange(whole.numel()).reshape(whole.shape)[cut].reshape(-1)


def _as_the_only_slice(
    value: Tensor, whole: Tensor, found: tuple[Tensor, Tensor, Tensor]
) -> Tensor | None:
    """(n,) which elements of the whole one a value's are, where none of its numbers is there once,
    as of words that come again, and it is one slice of it all the same; else None."""
    at, end, order = found
    times = end - at
    rarest = times.argmin()
    if not are_enough(value.unique()) or int(times[rarest]) > MOST_SLICES:
        return None
    first = rarest.reshape(1)
    slices = (_as_a_slice(value, whole, first, place.reshape(1))
              for place in order[at[rarest] : end[rarest]])  # fmt: skip
    told = [every for every in slices if every is not None]
    return told[0] if len(told) == 1 else None


def telling(flat: Tensor) -> Tensor:
    """Its different numbers that are not found anywhere, in order."""
    distinct = flat.unique()
    return distinct[(distinct != distinct.round()) & distinct.isfinite()]


def are_enough(distinct: Tensor) -> bool:
    """Whether different numbers are no chance where others equal them."""
    times = distinct * ROUND
    long = (times - times.round()).abs() > CLOSE * times.abs() + CLOSE
    return len(distinct) >= FEWEST or int(long.sum()) >= FEWEST_LONG
