"""Whether the backward of a Function that communicates is the adjoint of its forward, on all ranks.

When the step is over, the ranks run the forwards of the same calls once more, together: arguments
are moved a little, and each looks what becomes of its results. So the derivative of what all of
them were given is known, whichever way the Function communicates. What ranks hold alike is moved
alike, as it is one thing. All ranks have to come here, and they do everything in step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from sumgrad.record.adjoint import Adjoint
from sumgrad.subjects.program.functions.applied import (
    Applied,
    along,
    argument_name,
    is_as_it_was,
    run_again,
    step_of,
)
from sumgrad.subjects.program.functions.held_alike import (
    Held,
    Moved,
    Result,
    alike_results,
    can_be_moved,
)
from sumgrad.subjects.program.functions.meetings import Key, Meetings, Ranks, shared_calls
from torch import Tensor

MOST_RANKS = 8  # for which each rank's share is told from the others'
FEW = 3  # directions, where it is not
MOST_SECONDS = 5.0  # on the clock: no call is begun later
EQUAL = 1e-4  # of the largest slope, of those ahead and behind, and of what backwards gave
NOISE = 1e-7  # of what is multiplied: less is rounding

Exchange = Callable[[Any], list[Any]]  # what each rank has, to all of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank has along one direction.

    ahead, behind: of each result, what it was given times its change by a step, to either side.
    given: what its backward gave for what is moved, times that step. step: the longest, of an
    argument. outer: the largest number that its results were given.
    """

    ahead: tuple[float, ...]
    behind: tuple[float, ...]
    given: float
    step: float
    outer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """slopes, given: (directions, ranks)."""

    slopes: Sequence[Sequence[float]]
    given: Sequence[Sequence[float]]

    @property
    def agrees(self) -> bool:
        """Whether what the backwards gave is the derivative, but for one factor."""
        whole, given = ([sum(own) for own in side] for side in (self.slopes, self.given))
        squares = sum(x * x for x in whole)
        factor = sum(x * y for x, y in zip(whole, given, strict=True)) / squares if squares else 0.0
        off = max(abs(y - factor * x) for x, y in zip(whole, given, strict=True))
        return factor != 0 and off <= EQUAL * max(map(abs, given))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Ranks that run a call together. moved: what can be; alike: of each of its results, whether
    all of them have the same, and were given the same for it."""

    ranks: Ranks
    moved: Sequence[Moved]
    alike: tuple[bool, ...]


class Adjoints:
    """One rank's part in it. calls: its own; events: of its ledger; exchange: see Exchange."""

    def __init__(
        self,
        calls: Iterable[Applied],
        events: Iterable[Mapping[str, Any]],
        rank: int,
        exchange: Exchange,
    ) -> None:
        self.rank, self.exchange = rank, exchange
        told = (one for one in calls if _can_be_told(one))
        self._own = Meetings(told, events, rank)
        self._until = time.monotonic() + MOST_SECONDS

    def found(self) -> Iterator[Adjoint]:
        """Of every call that could be told, by the first rank that holds what is told of; all ranks
        go through all of them."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for key, groups in shared_calls(self.exchange(self._own.met)):
                mine = self._mine(key, groups)
                everyone = self.exchange((time.monotonic() < self._until, _held(mine)))
                if not everyone[0][0]:
                    return
                held = [[everyone[rank][1] for rank in ranks] for ranks in groups]
                yield from self._of_call(mine, [
                    _Group(ranks=ranks, moved=can_be_moved(ranks, own), alike=alike_results(own))
                    for ranks, own in zip(groups, held, strict=True)
                ])  # fmt: skip

    def _mine(self, key: Key, groups: Sequence[Ranks]) -> Applied | None:
        takes_part = any(self.rank in ranks for ranks in groups)
        return self._own.calls[key] if takes_part else None

    def _of_call(self, mine: Applied | None, groups: Sequence[_Group]) -> Iterator[Adjoint]:
        """All that can be moved at once; one after the other where that does not agree."""
        at_once = [(g, g.moved) for g in groups]
        every = self._told(mine, at_once, FEW)
        off = [t is not None and not t.agrees for t in every]
        agree = [None if no else t for t, no in zip(every, off, strict=True)]
        yield from self._own_of(mine, at_once, agree)
        left = [g for g, no in zip(groups, off, strict=True) if no]
        most = max((len(g.ranks) for g in left), default=0)
        num = most + 2 if most <= MOST_RANKS else FEW
        for i in range(max((len(g.moved) for g in left), default=0)):
            one_by_one = [(g, g.moved[i : i + 1] if g in left else ()) for g in groups]
            told = self._told(mine, one_by_one, num)
            yield from self._own_of(mine, one_by_one, told)

    def _own_of(
        self,
        mine: Applied | None,
        moving: Sequence[tuple[_Group, Sequence[Moved]]],
        told: Sequence[_Told | None],
    ) -> Iterator[Adjoint]:
        """What is this rank's to tell."""
        for (group, moved), one in zip(moving, told, strict=True):
            holders = {rank for own in moved for rank in own.holders}
            if mine is not None and one is not None and self.rank == min(holders):
                yield _adjoint(mine, group.ranks, moved, one)

    def _told(
        self, mine: Applied | None, moving: Sequence[tuple[_Group, Sequence[Moved]]], num: int
    ) -> list[_Told | None]:
        """Of each group along `num` directions; None where it tells nothing."""
        moved = next((own for group, own in moving if self.rank in group.ranks), ())
        shares: list[_Share] | None = None
        if mine is not None and moved:
            try:
                shares = [_along(mine, self.rank, moved, d) for d in range(num)]
            except Exception:  # a user's forward out of its step: it cannot be told
                shares = None
        everyone = self.exchange(shares)
        return [
            _together([everyone[rank] for rank in group.ranks], group.alike) if own else None
            for group, own in moving
        ]


def _held(mine: Applied | None) -> Held | None:
    """What a rank holds in a call; None where its forward, run again, gives something else."""
    if mine is None:
        return None
    try:
        if not is_as_it_was(mine, run_again(mine, {})):
            return None
    except Exception:  # as above
        return None
    assert mine.came is not None
    arguments = [_argument(mine, at) for at in range(len(mine.given))]
    results = [Result.of(gave, given) for gave, given in zip(mine.gave, mine.came[0], strict=True)]
    return Held(arguments=tuple(arguments), results=tuple(results))


def _together(shares: Sequence[list[_Share] | None], alike: Sequence[bool]) -> _Told | None:
    """Of a group's shares; None where it is not smooth there, or nothing depends on it."""
    own = [one for one in shares if one is not None]
    if len(own) < len(shares):
        return None
    step = max(s.step for rank in own for s in rank)
    least = NOISE * max(s.outer for rank in own for s in rank) * step
    pairs = [two for rank in own for s in rank for two in zip(s.ahead, s.behind, strict=True)]
    given = [s.given for rank in own for s in rank]
    if not all(map(math.isfinite, [*given, *(x for two in pairs for x in two)])):
        return None
    scale = max((abs(x) for two in pairs for x in two), default=0.0)
    if not scale or max(scale, *map(abs, given)) <= least:
        return None  # it does not move, as what is rounded
    if max(abs(a - b) for a, b in pairs) > EQUAL * scale + least:
        return None
    told = [_weighed(own, once, step) for once in _counted(alike, len(shares))]
    return next((one for one in told if one.agrees), told[0])


def _counted(alike: Sequence[bool], ranks: int) -> Iterator[tuple[float, ...]]:
    """How often each result counts: what all ranks have alike may be one thing, beside others."""
    if all(alike) or not any(alike):
        yield (1.0,) * len(alike)
        return
    yield from product(*((1.0, 1 / ranks) if same else (1.0,) for same in alike))


def _weighed(shares: Sequence[Sequence[_Share]], often: Sequence[float], step: float) -> _Told:
    along = [*zip(*shares, strict=True)]
    return _Told(
        slopes=[
            [
                sum(n * (a + b) / 2 for n, a, b in zip(often, s.ahead, s.behind, strict=True))
                / step
                for s in own
            ]
            for own in along
        ],
        given=[[s.given / step for s in own] for own in along],
    )


def _adjoint(mine: Applied, ranks: Ranks, moved: Sequence[Moved], told: _Told) -> Adjoint:
    arguments = sorted({one.at for one in moved})
    holders = sorted({rank for one in moved for rank in one.holders})
    at_holders = [ranks.index(rank) for rank in holders]
    alone = len(moved) == 1
    return Adjoint(
        function=mine.cls.__name__,
        written=mine.made.written,
        line=mine.line,
        call=mine.number,
        argument=", ".join(argument_name(mine.cls, at) for at in arguments),
        leaf=all(mine.leaves[at] for at in arguments),
        ranks=tuple(ranks),
        holders=tuple(holders),
        slopes=tuple(map(tuple, told.slopes)),
        given=tuple(tuple(own[i] for i in at_holders) for own in told.given),
        place=mine.computation if alone else -1,
        at=_tensors_before(mine, arguments[0]) if alone else -1,
    )


def _can_be_told(one: Applied) -> bool:
    """Whether its backward ran and gave what belongs to its results, and all of it is on CPUs."""
    tensors = [t for t in (*one.given, *one.gave) if isinstance(t, Tensor)]
    here = all(t.device.type == "cpu" for t in tensors)
    return here and one.came is not None and len(one.came[0]) == len(one.gave)


def _argument(one: Applied, at: int) -> tuple[Tensor, bool] | None:
    """One that can be moved, and whether it is to get a gradient."""
    value = one.given[at]
    if not isinstance(value, Tensor) or value.dtype != torch.float64 or not value.numel():
        return None
    if value.requires_grad and one.leaves[at] and _gave(one, at) is None:
        return None  # it may put it elsewhere
    return value.detach(), value.requires_grad


def _tensors_before(one: Applied, at: int) -> int:
    return sum(isinstance(value, Tensor) for value in one.given[:at])


def _gave(one: Applied, at: int) -> Tensor | None:
    """What its backward gave for an argument."""
    assert one.came is not None
    return one.came[1][_tensors_before(one, at)]


def _along(one: Applied, rank: int, moved: Sequence[Moved], number: int) -> _Share:
    """Its forward run twice, with the others'; it moves what it holds."""
    assert one.came is not None
    steps: dict[int, Tensor] = {}
    given = longest = 0.0
    for own in (own for own in moved if rank in own.ranks):
        value, at = one.given[own.at].detach(), own.at
        length = step_of(value)
        generator = torch.Generator().manual_seed(1000 * number + 100 * at + own.ranks[0])
        direction = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        steps[at] = length * direction
        gave, longest = _gave(one, at), max(length, longest)
        given += 0.0 if gave is None else float((gave * steps[at]).sum())
    up, down = (
        run_again(one, {at: one.given[at].detach() + sign * s for at, s in steps.items()})
        for sign in (1, -1)
    )
    outer = one.came[0]
    return _Share(
        ahead=_against(outer, up, one.gave),
        behind=_against(outer, one.gave, down),
        given=given,
        step=longest,
        outer=max((float(g.abs().max()) for g in outer if g is not None and g.numel()), default=0),
    )


def _against(
    outer: Sequence[Tensor | None], a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[float, ...]:
    return tuple(along(g, x, y) for g, x, y in zip(outer, a, b, strict=True))
