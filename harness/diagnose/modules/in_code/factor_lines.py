"""The line that gives shares of a loss the factors with which they count: what it multiplies by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from sumgrad.diagnose.modules.in_code.computed_otherwise import Both
from sumgrad.diagnose.modules.in_code.followed import followed, ways_of
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR
from sumgrad.diagnose.modules.values.numbers import CLOSE
from sumgrad.diagnose.modules.where.loss_weights import Share, same
from sumgrad.record.computed import Computation, Computed, same_value
from sumgrad.record.trace import Trace, Traces
from torch import Size, Tensor

MEANS = {
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss",
}  # fmt: skip
OF_TARGETS = {"cross_entropy", "nll_loss"}  # they divide by how many targets they do not ignore
MOST_PAIRED = 8  # lines that are tried two by two
Key = tuple[int, int]  # rank, call


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaling:
    """A computation that multiplies by one number, or divides by it.

    at: which of its arguments the number is; None where it takes a mean, over so many numbers.
    beside: it is a tensor, `by` times what the single process has beside the same numbers. theirs:
    which element of the single process's it is, and beside which it stands, where these are two.
    """

    mine: Computation
    at: int | None
    divides: bool
    by: float
    beside: bool = False
    theirs: tuple[int, int] | tuple[()] = ()

    @property
    def factor(self) -> float:
        return 1 / self.by if self.divides else self.by


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FactorLines:
    """Computations between a module and the loss that tell the factors of all shares: one, or
    several together.

    by: of each of them the number that it multiplies or divides by, of each share. right: of one
    alone, with which number in all shares every factor would be one. just: of one factor in all
    shares, whether it is the number; else they are all that multiply by what the single process
    does not. odd: of one alone that multiplies by what stands beside the same numbers there, the
    first share where it is another, and the line there.
    """

    lines: tuple[Scaling, ...]
    by: tuple[Mapping[Key, float], ...]
    right: float | None = None
    just: bool = False
    odd: tuple[Key, Scaling] | None = None


def lines_with_factors(traces: Traces, module: str, shares: Sequence[Share]) -> list[FactorLines]:
    """Those with numbers that the factors go with, of which each share has its own; where all have
    one factor, those that give it, or all that multiply by what nothing in the single process
    does."""
    factors: dict[Key, float] = {}
    for s in shares:
        if not s.factor or not same([factors.setdefault((s.rank, s.number), s.factor), s.factor]):
            return []
    every: list[dict[str, Scaling]] = []
    parts = {s.part for s in shares}
    ranks: dict[int, _Rank] = {}
    for rank, number in factors:
        if rank not in ranks:
            ranks[rank] = _Rank(traces.ranks[rank], traces.single.computed)
        every.append(ranks[rank].scalings(module, number, parts))
    sites = [site for site in every[0] if all(site in own for own in every)] if every else []
    held = [[own[site] for own in every] for site in sites]
    held = [own for own in held if len({(s.divides, s.beside) for s in own}) == 1]
    if same([*factors.values()]):
        return _of_one_factor(held, factors, traces.single.computed)
    varied = [own for own in held if not same([s.by for s in own])]
    found = [line for own in varied if (line := _told([own], factors)) is not None]
    pairs = combinations(varied[:MOST_PAIRED], 2)
    return found or [line for own in pairs if (line := _told(own, factors)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherNumber:
    """A line that multiplies by another number than the same line of the single process, which is
    `factor` times that, as the gradients of these shares are. there: that number."""

    mine: Scaling
    there: float
    factor: float
    ranks: tuple[int, ...]


def lines_with_other_numbers(
    traces: Traces, module: str, shares: Sequence[Share]
) -> list[OtherNumber]:
    """Of shares, of one part of the output each, that have one factor on a rank: the lines that
    give it."""
    there = _by_site(traces.single.computed)
    found: dict[str, list[OtherNumber]] = {}
    for rank, part in dict.fromkeys((s.rank, s.part) for s in shares):
        own = [s for s in shares if (s.rank, s.part) == (rank, part) and s.factor]
        factors = [s.factor for s in own if s.factor is not None]
        if not factors or not same(factors) or same([factors[0], 1.0]):
            continue
        held = _Rank(traces.ranks[rank], traces.single.computed)
        every = [held.scalings(module, s.number, {part}) for s in own]
        for site, one in every[0].items() if every else ():
            numbers = there.get(site, ())
            if one.beside or not numbers or not same(numbers) or not numbers[0] or not one.by:
                continue
            ratio = one.by / numbers[0] if not one.divides else numbers[0] / one.by
            if same([ratio, factors[0]]) and all(
                site in each and same([each[site].by, one.by]) for each in every
            ):
                other = OtherNumber(mine=one, there=numbers[0], factor=ratio, ranks=(rank,))
                found.setdefault(site, []).append(other)
    return [
        replace(ones[0], ranks=tuple(sorted({r for one in ones for r in one.ranks})))
        for ones in found.values()
    ]


def _by_site(whole: Computed) -> dict[str, list[float]]:
    """The numbers that each line of the single process multiplies or divides by."""
    out: dict[str, list[float]] = {}
    for c in whole.computations:
        for taken in range(min(len(c.takes), 2)):
            for one in _scaling(whole, c, taken):
                if one.at is not None:
                    out.setdefault(c.site, []).append(one.by)
    return out


def _told(held: Sequence[Sequence[Scaling]], factors: Mapping[Key, float]) -> FactorLines | None:
    """Where what they multiply by goes with the factors of all shares."""
    together = [math.prod(s.factor for s in own) for own in zip(*held, strict=True)]
    rest = [f / m for f, m in zip(factors.values(), together, strict=True)]
    if not same(rest):
        return None
    firsts = tuple(own[0] for own in held)
    by = tuple(dict(zip(factors, (s.by for s in own), strict=True)) for own in held)
    # The factor is m * rest, and one where the line multiplies by 1 / rest.
    right = rest[0] if firsts[0].divides else 1 / rest[0]
    just = same([*factors.values()]) and same([together[0], next(iter(factors.values()))])
    alone = len(firsts) == 1
    pairs = zip(factors, held[0], strict=True) if alone and firsts[0].beside else ()
    odd = next(((key, one) for key, one in pairs if not same([one.by, 1.0])), None)
    return FactorLines(lines=firsts, by=by, right=right if alone else None, just=just, odd=odd)


def _of_one_factor(
    held: Sequence[Sequence[Scaling]], factors: Mapping[Key, float], whole: Computed
) -> list[FactorLines]:
    """Of what no line of the single process multiplies by."""
    factor, there = next(iter(factors.values())), _numbers_there(whole)
    if abs(factor - 1) <= SAME_FACTOR:
        return []
    alike = [h for h in held if same([s.by for s in h])]
    own = [h for h in alike if not _is_there(h[0], there)]
    just = [h for h in own if same([h[0].factor, factor])]
    found = [line for h in just if (line := _told([h], factors)) is not None]
    return found or ([line] if own and (line := _told(own, factors)) is not None else [])


def _is_there(scaling: Scaling, there: Set[tuple[bool, str]]) -> bool:
    """Whether the single process multiplies by the same."""
    return same([scaling.by, 1.0]) if scaling.beside else _number(scaling) in there


def _number(scaling: Scaling) -> tuple[bool, str]:
    return scaling.divides, f"{scaling.by:.9g}"


def _numbers_there(whole: Computed) -> set[tuple[bool, str]]:
    """What the single process multiplies or divides by, wherever."""
    return {
        _number(one)
        for c in whole.computations
        for taken in range(min(len(c.takes), 2))
        for one in _scaling(whole, c, taken)
    }


class _Rank:
    """One rank's computations, by what they take, beside the single process's."""

    def __init__(self, trace: Trace, whole: Computed) -> None:
        self._trace, self._computed = trace, trace.computed
        self._ways = ways_of(trace.computed)
        self._both = Both(trace.computed, whole)

    def scalings(self, module: str, number: int, parts: Set[int]) -> dict[str, Scaling]:
        """By site, of what is made of that call's outputs; not of lines that run several times
        there with numbers of their own."""
        out: dict[str, Scaling] = {}
        several: set[str] = set()
        for c, taken in self._passed([*self._outputs(module, number, parts)]):
            for one in [*self._beside_one(c, taken)] or [
                *_scaling(self._computed, c, taken), *self._beside(c, taken)
            ]:  # fmt: skip
                if c.site in out and not same([out[c.site].by, one.by]):
                    several.add(c.site)
                out.setdefault(c.site, one)
        return {site: one for site, one in out.items() if site not in several}

    def _outputs(self, module: str, number: int, parts: Set[int]) -> Iterator[int]:
        """The numbers of the values that a call of a module gave as these parts of its output."""
        calls = (c for c in self._trace.calls if (c.module, c.number) == (module, number))
        given = [
            self._trace.output_of(call)
            for call in calls
            if not call.recomputed and call.part in parts
        ]
        for at in sorted(self._computed.with_graph):
            if any(same_value(self._computed.values[at], value) for value in given):
                yield at

    def _passed(self, numbers: Sequence[int]) -> Iterator[tuple[Computation, int]]:
        """What is computed of these values with a gradient, each with the one of its arguments by
        which it is reached first."""
        seen: set[int] = set()
        for number in (*numbers, *followed(numbers, self._ways.takes, self._gives)):
            for place in self._ways.takes.get(number, ()):
                if place not in seen:
                    seen.add(place)
                    c = self._computed.computations[place]
                    yield c, c.takes.index(number)

    def _gives(self, place: int) -> list[int]:
        """What a computation gives and a gradient can reach."""
        gives = self._computed.computations[place].gives
        return [n for n in gives if n in self._computed.with_graph]

    def _beside(self, c: Computation, taken: int) -> Iterator[Scaling]:
        """Where it multiplies by a tensor, which is one factor times that of the single process's
        line that takes the same."""
        at = 1 - taken
        if c.function not in ("mul", "div") or taken > 1 or (c.function == "div" and at != 1):
            return
        mine = self._weights(c.takes[at], self._computed) if len(c.takes) > 1 else None
        if mine is None:
            return
        shape = self._computed.values[c.takes[taken]].shape  # type: ignore[index]
        factors: list[float] = []
        for w in self._both.alike(c):
            for j in (1,) if c.function == "div" else (0, 1):
                its = self._weights(w.takes[j], self._both.whole)
                places = self._both.in_common(c.takes[taken], w.takes[1 - j])
                if its is not None and places is not None:
                    beside = self._both.whole.values[w.takes[1 - j]].shape  # type: ignore[index]
                    factors += _one_factor(mine, shape, its, beside, places)
        if factors and same(factors):
            yield Scaling(mine=c, at=at, divides=c.function == "div", by=factors[0], beside=True)

    def _beside_one(self, c: Computation, taken: int) -> Iterator[Scaling]:
        """The same of one number, by another of the single process's at the same line, which has
        several: that of a row, or of a token."""
        at = 1 - taken
        if c.function not in ("mul", "div") or len(c.takes) != 2 or (c.function == "div" and taken):
            return
        values, whole = self._computed.values, self._both.whole
        number, weight = c.takes[taken], c.takes[at]
        if not isinstance(number, int) or not isinstance(weight, int):
            return
        if weight in self._computed.with_graph or values[number].numel() != 1:
            return
        if values[weight].numel() != 1 or values[number].dtype != torch.float64:
            return
        for w in whole.computations:
            if (w.site, w.function, len(w.takes)) != (c.site, c.function, 2):
                continue
            theirs, beside = w.takes[taken], w.takes[at]
            if not isinstance(theirs, int) or not isinstance(beside, int):
                continue
            known, weights = whole.values[theirs].reshape(-1), whole.values[beside].reshape(-1)
            if len(known) < 2 or len(known) != len(weights):
                continue
            where = _the_only(known, float(values[number]))
            if where is None or not float(weights[where]):
                continue
            by = float(values[weight])
            other = _the_only(weights, by)
            yield Scaling(mine=c, at=at, divides=c.function == "div", beside=True,
                          by=by / float(weights[where]),
                          theirs=() if other in (None, where) else (other, where))  # fmt: skip
            return

    def _weights(self, argument: int | str, computed: Computed) -> Tensor | None:
        """Several numbers that no gradient passes."""
        if not isinstance(argument, int) or argument in computed.with_graph:
            return None
        value = computed.values[argument]
        return value.double() if value.numel() > 1 else None


def _the_only(numbers: Tensor, number: float) -> int | None:
    """Which of several numbers is this one; None where none is, or several are."""
    found = ((numbers.double() - number).abs() <= CLOSE * abs(number)).nonzero().reshape(-1)
    return int(found[0]) if len(found) == 1 and number else None


def _one_factor(
    mine: Tensor, shape: Size, its: Tensor, beside: Size, places: tuple[Tensor, Tensor]
) -> Iterator[float]:
    """What the weights of a tensor are times those of the whole one, where it is one number."""
    try:
        got = torch.broadcast_to(mine, shape).reshape(-1)[places[0]]
        wanted = torch.broadcast_to(its, beside).reshape(-1)[places[1]]
    except RuntimeError:
        return
    live = wanted != 0
    ratios = got[live] / wanted[live]
    if len(ratios) and not bool(got[~live].any()) and same([*ratios.tolist()]):
        yield float(ratios[0])


def _scaling(computed: Computed, c: Computation, taken: int) -> Iterator[Scaling]:
    if c.function in ("mul", "div") and len(c.takes) >= 2 and taken < 2:
        at = 1 - taken
        by = _one_number(computed, c.takes[at])
        if by is not None and (c.function == "mul" or at == 1):
            yield Scaling(mine=c, at=at, divides=c.function == "div", by=by)
    elif taken == 0 and (num := _averaged(computed, c)):
        yield Scaling(mine=c, at=None, divides=True, by=num)


def _one_number(computed: Computed, argument: int | str) -> float | None:
    if isinstance(argument, int):
        value = computed.values[argument]
        alone = value.numel() == 1 and argument not in computed.with_graph
        return float(value) if alone else None
    try:
        return float(argument)
    except ValueError:
        return None


def _averaged(computed: Computed, c: Computation) -> float:
    """Over how many numbers it takes the mean; 0 where it takes none, or it is not known."""
    first = c.takes[0]
    if not isinstance(first, int) or len(c.gives) != 1:
        return 0.0
    given = computed.values[c.gives[0]].numel()
    if c.function == "mean":
        return computed.values[first].numel() / max(given, 1)
    words = {t for t in c.takes if isinstance(t, str)}
    if c.function not in MEANS or "reduction='mean'" not in words or given != 1:
        return 0.0
    if c.function not in OF_TARGETS:
        return float(computed.values[first].numel())
    ignored = next((w for w in words if w.startswith("ignore_index=")), "")
    second = c.takes[1] if len(c.takes) > 1 else ""
    if not ignored or not isinstance(second, int) or "weight=None" not in words:
        return 0.0
    return float((computed.values[second] != int(ignored.partition("=")[2])).sum())


def numbers_in(by: Mapping[Key, float]) -> dict[float, list[Key]]:
    """The numbers that a line multiplies or divides by, each with the shares where it does."""
    out: dict[float, list[Key]] = {}
    for key, number in by.items():
        known = next((k for k in out if same([k, number])), number)
        out.setdefault(known, []).append(key)
    return out
