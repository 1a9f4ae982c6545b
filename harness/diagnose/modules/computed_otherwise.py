"""Lines that compute with one thing of the single process's, and with another beside it.

Where a rank's line and one of the single process call the same function, and the numbers of one
argument are all found in that of the other, element by element, the arguments beside it can be
compared element by element, too: a mean, a mask, a count, a target. In float64, where equal numbers
are no chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.record.computed import Computation, Computed
from torch import Tensor

CLOSE = 1e-9  # of the number itself
FEWEST = 3  # different numbers: fewer are found by chance
SAMPLES = 8
NUMBERS = {"add", "sub", "rsub", "mul", "div", "rdiv", "pow", "clamp", "lerp"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Otherwise:
    """A rank's computation `mine` takes another argument number `at` than the single process's.

    factor: of all its numbers, where it is one. num, of: how many of its elements that were
    compared are others; none where only the gradient that would flow back through it is missing.
    now, was: the first of these. place: in the rank's computations.
    """

    rank: int
    mine: Computation
    its: Computation
    at: int
    factor: float | None
    num: int
    of: int
    now: float
    was: float
    place: int


def computed_otherwise(rank: int, mine: Computed, whole: Computed) -> Iterator[Otherwise]:
    """The computations of a rank that take something else, in the order of the rank."""
    there = _Table(whole.values)
    by_function: dict[str, list[Computation]] = {}
    for c in whole.computations:
        by_function.setdefault(c.function, []).append(c)
    known: dict[int, frozenset[int]] = {}
    for place, c in enumerate(mine.computations):
        beside = by_function.get(c.function, ())
        for number in {t for t in c.takes if isinstance(t, int)} if beside else ():
            if number not in known:
                known[number] = there.holding(mine.values[number])
        found = list(_compared(rank, place, mine, whole, beside, known, there))
        if not found or None in found:
            continue
        others = [f for f in found if f is not None]
        own = [f for f in others if f.its.line == f.mine.line]
        if own or len({(f.its.line, f.was, f.at) for f in others}) == 1:
            yield (own or others)[0]


def _compared(
    rank: int,
    place: int,
    mine: Computed,
    whole: Computed,
    beside: Sequence[Computation],
    known: dict[int, frozenset[int]],
    there: _Table,
) -> Iterator[Otherwise | None]:
    """One for each computation with an argument in common; None where the others are the same."""
    c = mine.computations[place]
    for w in beside:
        if len(w.takes) != len(c.takes):
            continue
        for j, (a, b) in enumerate(zip(c.takes, w.takes, strict=True)):
            if not isinstance(a, int) or not isinstance(b, int) or b not in known[a]:
                continue
            places = there.places(mine.values[a], b)
            if places is None:
                continue
            shapes = mine.values[a].shape, whole.values[b].shape
            states = [
                _beside(x, y, mine, whole, c.function, shapes, places, alike=c.code == w.code)
                for i, (x, y) in enumerate(zip(c.takes, w.takes, strict=True))
                if i != j
            ]
            if None in states:
                continue  # nothing that could be compared
            at = next((i for i, s in enumerate(states) if s), None)
            if at is not None:
                factor, num, of, now, was = states[at]  # type: ignore[misc]
                at += at >= j
            else:
                at = _cut_off(c, w) if c.code == w.code else None
                factor, num, of, now, was = None, 0, 0, 0.0, 0.0
            yield None if at is None else Otherwise(
                rank=rank, mine=c, its=w, at=at, factor=factor, num=num, of=of, now=now, was=was,
                place=place,
            )  # fmt: skip
            break


def _cut_off(mine: Computation, its: Computation) -> int | None:
    """Which argument has no gradient here, and one in the single process."""
    pairs = zip(mine.with_gradient, its.with_gradient, strict=False)
    return next((i for i, (now, was) in enumerate(pairs) if was and not now), None)


State = tuple[float | None, int, int, float, float] | tuple[()]


def _beside(
    x: int | str, y: int | str, mine: Computed, whole: Computed, function: str,
    shapes: tuple[torch.Size, torch.Size], places: tuple[Tensor, Tensor], *, alike: bool,
) -> State | None:  # fmt: skip
    """How another argument differs: () where it does not, None where that cannot be told.

    alike: whether both lines are the same words. Where they are not, single numbers may be put
    together in another order, a * (b / c) for (a * b) / c, and zeros are a way to use nothing. What
    is added may be a part of a sum, as it is put together.
    """
    if isinstance(x, str) and isinstance(y, str):
        if x == y:
            return ()
        if function not in NUMBERS:
            return None
    got, wanted = _tensor(x, mine), _tensor(y, whole)
    if got is None or wanted is None:
        return None
    flat, beside = _spread(got, shapes[0]), _spread(wanted, shapes[1])
    number = _spread(torch.arange(got.numel()).reshape(got.shape), shapes[0])
    if flat is None or beside is None or number is None:
        return None
    state = _differ(flat[places[0]], beside[places[1]], number[places[0]])
    single = min(got.numel(), wanted.numel()) == 1
    if state and ((not alike and (single or state[0] == 0)) or (function == "add" and not single)):
        return None
    return state


def _tensor(argument: int | str, computed: Computed) -> Tensor | None:
    if isinstance(argument, int):
        return computed.values[argument]
    try:
        return torch.tensor(float(argument), dtype=torch.float64)
    except ValueError:
        return None


def _spread(tensor: Tensor, shape: torch.Size) -> Tensor | None:
    """Flat, one number for each element of another argument's shape."""
    try:
        if tensor.dim() < len(shape) and tensor.dim() and tensor.shape == shape[: tensor.dim()]:
            tensor = tensor.reshape(*tensor.shape, *[1] * (len(shape) - tensor.dim()))
        return torch.broadcast_to(tensor, shape).reshape(-1).double()
    except RuntimeError:
        return None


def _differ(got: Tensor, wanted: Tensor, number: Tensor) -> State:
    """number: which element of the rank's own tensor each is."""
    scale = float(wanted.abs().max()) if len(wanted) else 0.0
    same = (got == wanted) | ((got - wanted).abs() <= CLOSE * (wanted.abs() + 1e-3 * scale))
    same |= got.isnan() & wanted.isnan()
    if bool(same.all()):
        return ()
    live = wanted != 0
    ratios = got[live] / wanted[live]
    factor = None
    if len(ratios) and not bool(got[~live].any()):
        r = float(ratios[0])
        if math.isfinite(r) and bool(((ratios - r).abs() <= CLOSE * abs(r)).all()):
            factor = r
    first = int((~same).nonzero()[0])
    num, of = len(number[~same].unique()), len(number.unique())
    return factor, num, of, float(got[first]), float(wanted[first])


class _Table:
    """All float64 numbers of the single process, in order."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._values = values
        self._sorted: dict[int, tuple[Tensor, Tensor]] = {}
        floats = [(i, v.reshape(-1)) for i, v in enumerate(values) if v.dtype == torch.float64]
        numbers = [f for _, f in floats] or [torch.empty(0, dtype=torch.float64)]
        owners = [torch.full((len(f),), i) for i, f in floats] or [torch.empty(0, dtype=torch.long)]
        self._numbers, order = torch.cat(numbers).sort()
        self._owners = torch.cat(owners)[order]

    def holding(self, value: Tensor) -> frozenset[int]:
        """The numbers of values that have a sample of these, if they tell anything."""
        if value.dtype != torch.float64:
            return frozenset()
        distinct = value.reshape(-1).unique()
        distinct = distinct[(distinct != distinct.round()) & distinct.isfinite()]
        if len(distinct) < FEWEST:
            return frozenset()
        sample = distinct[torch.linspace(0, len(distinct) - 1, SAMPLES).long().unique()]
        held: frozenset[int] | None = None
        for number in sample.tolist():
            width = CLOSE * abs(number)
            ends = torch.tensor([number - width, number + width], dtype=torch.float64)
            low, high = torch.searchsorted(self._numbers, ends).tolist()
            own = frozenset(self._owners[low:high].tolist())
            held = own if held is None else held & own
            if not held:
                break
        return held or frozenset()

    def places(self, value: Tensor, number: int) -> tuple[Tensor, Tensor] | None:
        """(n,) which elements of a value, and (n,) which of the whole one they are; None unless
        all are there. Without numbers that stand there several times."""
        if number not in self._sorted:
            self._sorted[number] = self._values[number].reshape(-1).sort()
        numbers, order = self._sorted[number]
        flat = value.reshape(-1)
        at = torch.searchsorted(numbers, flat - CLOSE * flat.abs())
        end = torch.searchsorted(numbers, flat + CLOSE * flat.abs(), right=True)
        if bool((end == at).any()):
            return None
        told = (end - at == 1).nonzero().reshape(-1)
        if len(flat[told].unique()) < FEWEST:
            return None
        return told, order[at[told]]
