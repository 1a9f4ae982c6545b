"""What a line takes on a rank, beside what the same call in the code takes in the single process:
vectors in another order, dimensions that are broadcast on the rank alone, other parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from sumgrad.base.outcome import spans
from sumgrad.diagnose.modules.values.matching import match, vectors
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.line import Line
from torch import Tensor

FEWEST_NUMBERS = 6  # different ones, that tell a parameter
MOST_STEPS = 16  # back along what is broadcast


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherOrder:
    """Argument `at` has, along its last dimension but one, the single process's vectors of these
    places, in this order."""

    at: int
    places: tuple[int, ...]
    dim: int

    def in_words(self) -> str:
        """`4-7, 0-3`."""
        runs: list[list[int]] = []
        for place in self.places:
            if runs and place == runs[-1][-1] + 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        return ", ".join(spans(run) for run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Argument `at` has one place in dimension `dim` of the result, and `size` there. line: the
    first that takes such a tensor, of shape `now`, and `was` there."""

    at: int
    dim: int
    size: int
    line: Line
    now: tuple[int, ...]
    was: tuple[int, ...]


def in_another_order(
    mine: Computed, whole: Computed, c: Computation, tolerance: float
) -> Iterator[OtherOrder]:
    """c: of `mine`. Where every vector is told, and stands where all of its place do."""
    there = _there(whole, c)
    for at, a in enumerate(c.takes):
        values = [w.takes[at] for w in there]
        if not isinstance(a, int) or not all(isinstance(b, int) for b in values):
            continue
        got = mine.values[a]
        told = [_places(got, whole.values[b], tolerance) for b in values if isinstance(b, int)]
        found = [places for places in told if places]
        # In its order in some run of it, it is in order.
        if found and all(any(x >= y for x, y in pairwise(places)) for places in found):
            yield OtherOrder(at=at, places=found[0], dim=got.dim() - 2)


def broadcast_here(mine: Computed, whole: Computed, c: Computation) -> Iterator[Broadcast]:
    """c: of `mine`. Where the result has as many places there in both."""
    there_too = _there(whole, c)
    for w in there_too[:1]:
        if len(c.gives) != 1 or len(w.gives) != 1:
            continue
        result, there = mine.values[c.gives[0]].shape, whole.values[w.gives[0]].shape
        if len(result) != len(there):
            continue
        for at, (a, b) in enumerate(zip(c.takes, w.takes, strict=True)):
            if not isinstance(a, int) or not isinstance(b, int):
                continue
            now, was = mine.values[a].shape, whole.values[b].shape
            for dim in _single(now, was):
                size = there[len(there) + dim]
                every = [t.takes[at] for t in there_too]
                shapes = [whole.values[t].shape for t in every if isinstance(t, int)]
                if any(dim in _single(shape, was) for shape in shapes):
                    continue  # in some run of it that is so there, too
                if result[len(there) + dim] == size == was[dim]:
                    line, first, its = _first_with(mine, whole, a, (c, at, w))
                    yield Broadcast(at=at, dim=len(there) + dim, size=size, line=line,
                                    now=first, was=its)  # fmt: skip
                    break


def _there(whole: Computed, c: Computation) -> list[Computation]:
    """The same call in the code, with as many arguments."""
    return [w for w in whole.computations
            if w.site == c.site and w.function == c.function
            and len(w.takes) == len(c.takes)]  # fmt: skip


def _places(got: Tensor, wanted: Tensor, tolerance: float) -> tuple[int, ...]:
    """Of each place of the last dimension but one that where all its vectors stand."""
    if not got.is_floating_point() or min(got.dim(), wanted.dim()) < 3:
        return ()
    if got.shape[-1] != wanted.shape[-1] or got.shape[-2] < 2:
        return ()
    where = match(vectors(got), vectors(wanted), tolerance)
    if where is None or not bool(where.found.any(1).all()):
        return ()
    size = wanted.shape[-2]
    found = where.found.reshape(len(where.found), -1, size).any(1)  # (n, places)
    own = where.picked % got.shape[-2]
    out = []
    for place in range(got.shape[-2]):
        common = found[own == place].all(0).nonzero()[:, 0]
        if len(common) != 1 or not bool((own == place).any()):
            return ()
        out.append(int(common))
    return tuple(out)


def _single(now: torch.Size, was: torch.Size) -> list[int]:
    """Dimensions, from the last, in which the one has one place, or none, and the other several."""
    return [-i for i in range(1, len(was) + 1) if was[-i] > 1 and (len(now) < i or now[-i] == 1)]


def _first_with(
    mine: Computed, whole: Computed, number: int, at: tuple[Computation, int, Computation]
) -> tuple[Line, tuple[int, ...], tuple[int, ...]]:
    """Back along what makes it, while something that is taken has one place where the single
    process's has several: the first line that does, and the two shapes."""
    c, i, w = at
    makers = {n: m for m in reversed(mine.computations) for n in m.gives}
    for _ in range(MOST_STEPS):
        maker = makers.get(number)
        its = _there(whole, maker)[:1] if maker is not None else []
        pairs = [
            (k, a)
            for k, (a, b) in enumerate(zip(maker.takes, its[0].takes, strict=True))
            if isinstance(a, int) and isinstance(b, int)
            and _single(mine.values[a].shape, whole.values[b].shape)
        ] if maker is not None and its else []  # fmt: skip
        if maker is None or not pairs:
            break
        (i, number), c, w = pairs[0], maker, its[0]
    b = w.takes[i]
    assert isinstance(b, int)
    shapes = tuple(mine.values[number].shape), tuple(whole.values[b].shape)
    return (c.line, c.code), *shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Argument `at` is the parameter `name`. there: which it is in the single process, one after
    the other, each once."""

    at: int
    name: str
    there: tuple[str, ...]


def parameters_taken(
    mine: Computed, whole: Computed, c: Computation, params: Mapping[str, Tensor]
) -> Iterator[Taken]:
    """c: of `mine`. Where the single process's same call in the code takes several, by value."""
    for at, number in enumerate(c.takes):
        name = _parameter(mine, number, params)
        if name is None:
            continue
        there = [_parameter(whole, w.takes[at], params) for w in _there(whole, c)]
        named = tuple(dict.fromkeys(n for n in there if n is not None))
        if None not in there and len(named) > 1:
            yield Taken(at=at, name=name, there=named)


def _parameter(computed: Computed, number: int | str, params: Mapping[str, Tensor]) -> str | None:
    """The one parameter that has all numbers of a value, in their order."""
    if not isinstance(number, int):
        return None
    flat = computed.values[number].reshape(-1).double()
    if len(flat.unique()) < FEWEST_NUMBERS:
        return None
    found = [
        name
        for name, param in params.items()
        if param.numel() == len(flat) and torch.equal(param.reshape(-1).double(), flat)
    ]
    return found[0] if len(found) == 1 else None
