"""Functions that move numbers, over ranks too, and whether their backwards bring gradients back.

Which number of a result is which of an argument is found by value, over all calls and ranks: in
float64 none stands there twice by chance. An element's gradient must be the sum of what its copies
were given; where it is not, it is told by which of these are in it, or which other result's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.derivative import Back
from sumgrad.record.line import Line
from sumgrad.record.trace import Trace
from torch import Tensor

MOST_NUMBERS = 50_000  # of all calls of one Function on all ranks
MOST_COPIES = 3  # of one element, whose shares are told apart
MOST_TOLD = 256  # elements whose gradients are looked for in others'
EQUAL = 1e-9  # of the largest gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """One number of what a call takes or gives: rank, which call of the Function there, and where
    in the tensor."""

    rank: int
    call: int
    index: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """An element whose gradient is not the sum of what its copies were given.

    copies: in the results. lacks: of these those whose gradient is not in it. foreign: an element
    of the results whose gradient is in it and that is no copy of it; owner: what it is a copy of.
    times: it is so many times the sum. All empty: how it comes to it is not known. replicas: the
    results that hold its copies are one and the same, as after a gather; what follows may count
    them as one.
    """

    element: Element
    copies: tuple[Element, ...]
    lacks: tuple[Element, ...] = ()
    foreign: Element | None = None
    owner: Element | None = None
    times: float | None = None
    replicas: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mover:
    """A Function that gives nothing but numbers that it takes, and zeros.

    told: how many elements' gradients were held against their copies', untold: how many not; off:
    how many are others; wrong: the first of these. crossed: what one rank takes in one call another
    takes in another call: they call it in another order.
    """

    function: str
    written: str
    lines: tuple[Line, ...]
    told: int
    untold: int
    off: int
    wrong: tuple[Brought, ...]
    crossed: tuple[Element, Element] | None = None

    @property
    def is_right(self) -> bool:
        return not self.off and not self.untold


def movers(ranks: Mapping[int, Trace], *, alone: bool = False) -> dict[tuple[str, str], Mover]:
    """By class and by where the backward stands: of those that communicate, or, alone, of all."""
    calls: dict[tuple[str, str], list[_Call]] = {}
    unknown: set[tuple[str, str]] = set()
    for rank, trace in ranks.items():
        backs = {back.computation: back for back in trace.computed.backs}
        for i, made in enumerate(trace.computed.computations):
            key = made.function, made.written
            if made.written and i in backs:
                own = calls.setdefault(key, [])
                number = sum(one.rank == rank for one in own)
                own.append(_Call(rank=rank, number=number, made=made, computed=trace.computed,
                                 back=backs[i]))  # fmt: skip
            elif made.written and _has_a_gradient(made, trace.computed):
                unknown.add(key)
    asked = {k: own for k, own in calls.items() if alone or not all(c.back.alone for c in own)}
    found = {key: _of_calls(key, own) for key, own in asked.items() if key not in unknown}
    return {key: one for key, one in found.items() if one is not None}


def _of_calls(key: tuple[str, str], calls: list[_Call]) -> Mover | None:
    """Turn by turn where the ranks take turns together, as numbers that go round in a ring are
    taken once by each; else all at once."""
    turns = [[c for c in calls if c.number == n] for n in range(len(calls))]
    found = [_mover(key, own) for own in turns if own]
    if None in found:
        return _mover(key, calls)
    told = [one for one in found if one is not None]
    return replace(
        told[0],
        crossed=_crossed(calls),
        lines=tuple(dict.fromkeys(line for one in told for line in one.lines)),
        told=sum(one.told for one in told),
        untold=sum(one.untold for one in told),
        off=sum(one.off for one in told),
        wrong=tuple(w for one in told for w in one.wrong),
    )


def _crossed(calls: list[_Call]) -> tuple[Element, Element] | None:
    """The first call of a rank that takes what another takes in another call, and not in this one;
    what came there from another rank, as in a ring, aside."""
    given = [(c, c.computed.values[n]) for c in calls for n in c.made.gives]

    def came(c: _Call, value: Tensor) -> bool:
        return any(o.rank == c.rank and o.number < c.number and _near(value, g) for o, g in given)

    every = [(c, c.computed.values[n]) for c in calls for n in c.made.takes if isinstance(n, int)]
    taken = [(c, value) for c, value in every if not came(c, value)]
    for mine, value in taken:
        for c, other in taken:
            if c.rank <= mine.rank or c.number == mine.number or not _near(value, other):
                continue
            beside = [v for o, v in every if (o.rank, o.number) == (c.rank, mine.number)]
            if beside and not any(_near(value, v) for v in beside):
                return (Element(rank=mine.rank, call=mine.number, index=()),
                        Element(rank=c.rank, call=c.number, index=()))  # fmt: skip
    return None


def _near(a: Tensor, b: Tensor) -> bool:
    alike = a.shape == b.shape and bool(a.any())
    return alike and bool(((a - b).abs() <= EQUAL * a.abs().max()).all())


def _has_a_gradient(made: Computation, computed: Computed) -> bool:
    known = {n for own in computed.gradients for n in own}
    return not made.gives or any(n in known for n in made.gives)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Call:
    rank: int
    number: int
    made: Computation
    computed: Computed
    back: Back


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """Arguments or results of all calls, one number after the other."""

    tensors: tuple[tuple[int, int, torch.Size], ...]
    values: Tensor
    gradients: Tensor

    def stretches(self) -> Iterator[tuple[tuple[int, int, torch.Size], int, int]]:
        """Each tensor, and where it begins and ends."""
        start = 0
        for one in self.tensors:
            yield one, start, start + one[2].numel()
            start += one[2].numel()

    def element(self, at: int) -> Element:
        tensor, start = self._tensor(at)
        rank, call, shape = self.tensors[tensor]
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at - start), shape))
        return Element(rank=rank, call=call, index=index)

    def are_replicas(self, places: Sequence[int]) -> bool:
        """Whether several tensors hold these, and all are the same."""
        starts = {tensor: start for tensor, start in map(self._tensor, places)}
        held = [self.values[start : start + self.tensors[tensor][2].numel()]
                for tensor, start in starts.items()]  # fmt: skip
        return len(held) > 1 and all(torch.equal(one, held[0]) for one in held)

    def _tensor(self, at: int) -> tuple[int, int]:
        """Which tensor a place is in, and where that begins."""
        for i, (_, start, end) in enumerate(self.stretches()):
            if at < end:
                return i, start
        raise IndexError(at)


def _mover(key: tuple[str, str], calls: list[_Call]) -> Mover | None:
    takes = _side([(c, c.made.takes, c.back.inner) for c in calls])
    gives = _side([(c, c.made.gives, c.back.outer) for c in calls])
    if takes is None or gives is None:
        return None
    known, counts = takes.values.unique(return_counts=True)
    # As where replicas round otherwise.
    size = known.abs().max() if len(known) else known.new_zeros(())
    near = known.diff().abs() <= EQUAL * known[1:].abs().clamp(min=float(size) * EQUAL)
    counts[1:] += near.long()
    counts[:-1] += near.long()
    place = torch.searchsorted(known, gives.values).clamp(max=len(known) - 1)
    is_one = known[place] == gives.values
    if not bool((is_one | (gives.values == 0)).all()):
        return None  # it computes something
    order = takes.values.argsort()
    first = torch.searchsorted(takes.values[order], known)
    source = torch.where(is_one & (counts[place] == 1), order[first[place]], -1)
    whole = torch.zeros_like(takes.gradients)
    whole.index_add_(0, source[source >= 0], gives.gradients[source >= 0])
    told = counts[torch.searchsorted(known, takes.values)] == 1
    told &= _of_calls_that_give_some(takes, gives, source)
    least = EQUAL * float(torch.cat([takes.gradients.abs(), whole.abs()]).max())
    off = told & ((takes.gradients - whole).abs() > least)
    return Mover(
        function=key[0],
        written=key[1],
        lines=tuple(dict.fromkeys((c.made.line, c.made.code) for c in calls)),
        told=int(told.sum()),
        untold=int((~told & (takes.gradients != 0)).sum()),
        off=int(off.sum()),
        wrong=tuple(_brought(takes, gives, source, whole, off, least)),
    )


def _of_calls_that_give_some(takes: _Side, gives: _Side, source: Tensor) -> Tensor:
    """Which elements are of calls whose own results hold some number that is taken: what only sends
    gives nothing, and its copies are another Function's results."""
    some = {
        (rank, call)
        for (rank, call, _), start, end in gives.stretches()
        if bool((source[start:end] >= 0).any())
    }
    told = torch.zeros(len(takes.values), dtype=torch.bool)
    for (rank, call, _), start, end in takes.stretches():
        told[start:end] = (rank, call) in some
    return told


def _side(
    held: Sequence[tuple[_Call, Sequence[int | str], Sequence[Tensor | None]]],
) -> _Side | None:
    """None where something is not known, or is no float64."""
    values, gradients, tensors = [], [], []
    for call, numbers, came in held:
        if len(numbers) != len(came):
            return None
        for number, gradient in zip(numbers, came, strict=True):
            if gradient is None:
                continue
            value = call.computed.values[number] if isinstance(number, int) else None
            if value is None or value.dtype != torch.float64 or gradient.shape != value.shape:
                return None
            values.append(value.flatten())
            gradients.append(gradient.flatten())
            tensors.append((call.rank, call.number, value.shape))
    if not values or sum(map(len, values)) > MOST_NUMBERS:
        return None
    return _Side(tensors=tuple(tensors), values=torch.cat(values), gradients=torch.cat(gradients))


def _brought(
    takes: _Side, gives: _Side, source: Tensor, whole: Tensor, off: Tensor, least: float
) -> Iterator[Brought]:
    order = gives.gradients.argsort()
    ordered = gives.gradients[order]
    factors = _factors(takes, whole, off, least)
    for at in off.nonzero().flatten()[:MOST_TOLD].tolist():
        copies = (source == at).nonzero().flatten().tolist()
        one = Brought(
            element=takes.element(at),
            copies=tuple(map(gives.element, copies)),
            times=factors.get(at),
            replicas=gives.are_replicas(copies),
        )
        gradient = float(takes.gradients[at])
        yield (
            one
            if one.times is not None or len(copies) > MOST_COPIES
            else _told(one, gradient, copies, takes, gives, source, (ordered, order), least)
        )


def _factors(takes: _Side, whole: Tensor, off: Tensor, least: float) -> dict[int, float]:
    """Place -> factor, of calls all of whose elements have one: what only scales, it may be each
    call by a factor of its own."""
    found: dict[int, float] = {}
    for _, start, end in takes.stretches():
        live = (whole[start:end].abs() > least).nonzero()[:, 0] + start
        zero = (takes.gradients[start:end].abs() > least) & (whole[start:end].abs() <= least)
        ratio = takes.gradients[live] / whole[live]
        alike = len(live) and bool(((ratio - ratio[0]).abs() <= EQUAL * ratio[0].abs()).all())
        if alike and not bool(zero.any()) and bool(off[live].all()):
            found |= dict.fromkeys(live.tolist(), float(ratio[0]))
    return found


def _told(
    one: Brought,
    gradient: float,
    copies: list[int],
    takes: _Side,
    gives: _Side,
    source: Tensor,
    by_size: tuple[Tensor, Tensor],
    least: float,
) -> Brought:
    """By which shares it is what it is: the most of its own, and at most one of another's."""
    for foreign in (False, True):
        for size in range(len(copies), -1, -1):
            for kept in combinations(copies, size):
                rest = gradient - float(gives.gradients[list(kept)].sum())
                lacks = [c for c in copies if c not in kept]
                told = replace(one, lacks=tuple(map(gives.element, lacks)))
                if not foreign and abs(rest) <= least:
                    return told
                q = _of_value(by_size, source, rest, least) if foreign else None
                if q is not None and q not in copies:
                    owner = int(source[q])
                    return replace(
                        told,
                        foreign=gives.element(q),
                        owner=takes.element(owner) if owner >= 0 else None,
                    )
    return one


def _of_value(
    by_size: tuple[Tensor, Tensor], source: Tensor, value: float, least: float
) -> int | None:
    """A number that has this value; None where several have that are no copies of one."""
    ordered, order = by_size
    if abs(value) <= least:
        return None
    ends = torch.tensor([value - least, value + least], dtype=ordered.dtype)
    low, high = torch.searchsorted(ordered, ends)
    found = order[low:high]
    sources = set(source[found].tolist())
    alike = len(found) == 1 or (len(sources) == 1 and -1 not in sources)
    return int(found.min()) if alike else None
