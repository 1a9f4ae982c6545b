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
from typing import Any

import torch
from sumgrad.ledger.operations import members
from sumgrad.record.adjoint import Adjoint
from sumgrad.subjects.program.applied import (
    Applied,
    argument_name,
    is_as_it_was,
    run_again,
    step_of,
)
from torch import Tensor

MOST_CALLS = 2  # of one line
MOST_OF_A_FUNCTION = 6
MOST_IN_ALL = 24
MOST_RANKS = 8  # for which each rank's share is told from the others'
FEW = 3  # directions, where it is not
MOST_SECONDS = 5.0  # on the clock: no call is begun later
SAME = 1e-9  # of the largest number: ranks hold the same
EQUAL = 1e-4  # of the largest slope, of those ahead and behind, and of what backwards gave
NOISE = 1e-7  # of what is multiplied: less is rounding

Key = tuple[str, str, str, int]  # of a call: its Function, its line, and which of it
Exchange = Callable[[Any], list[Any]]  # what each rank has, to all of them
Moved = tuple[int, tuple[int, ...]]  # an argument, and the ranks that hold the same there


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one rank has along one direction.

    ahead, behind: what its results were given, times their change by a step, to either side. given:
    what its backward gave for what is moved, times that step. step: the longest, of an argument.
    outer: the largest number that its results were given.
    """

    ahead: float = 0.0
    behind: float = 0.0
    given: float = 0.0
    step: float = 0.0
    outer: float = 0.0


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
        groups = {int(event["n"]): members(event) for event in events if "op" in event}
        self._calls: dict[Key, Applied] = {}
        self._peers: dict[Key, frozenset[int]] = {}
        for one in calls:
            issued = (*range(*one.operations), *range(one.began, one.ended))
            if issued and _can_be_told(one):
                key = (one.cls.__name__, *one.line, one.number)
                self._calls[key] = one
                self._peers[key] = frozenset(r for n in issued for r in groups.get(n, ()))
        self._until = time.monotonic() + MOST_SECONDS

    def found(self) -> Iterator[Adjoint]:
        """Of every call of this rank that could be told; all ranks go through all of them."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for key, ranks in _shared(self.exchange(self._peers)):
                mine = self._calls[key] if self.rank in ranks else None
                held = None if mine is None else _arguments(mine)
                everyone = self.exchange((time.monotonic() < self._until, held))
                if not everyone[0][0]:
                    return
                by_rank = {rank: everyone[rank][1] for rank in ranks}
                yield from self._of_call(mine, ranks, _can_be_moved(by_rank))

    def _of_call(
        self, mine: Applied | None, ranks: Sequence[int], moved: Sequence[Moved]
    ) -> Iterator[Adjoint]:
        """All that can be moved at once; one after the other where that does not agree."""
        told = self._told(mine, ranks, moved, FEW) if moved else None
        if told is None or told.agrees:
            yield from _adjoint(mine, ranks, moved, told)
            return
        num = len(ranks) + 2 if len(ranks) <= MOST_RANKS else FEW
        for one in moved:
            yield from _adjoint(mine, ranks, [one], self._told(mine, ranks, [one], num))

    def _told(
        self, mine: Applied | None, ranks: Sequence[int], moved: Sequence[Moved], num: int
    ) -> _Told | None:
        """Along `num` directions; None where it is not smooth there, or nothing depends on it."""
        own = [_along(mine, self.rank, moved, d) for d in range(num)] if mine is not None else []
        everyone = self.exchange(own)
        shares: list[list[_Share]] = [everyone[rank] for rank in ranks]
        step = max(s.step for own in shares for s in own)
        least = NOISE * max(s.outer for own in shares for s in own) * step
        ahead, behind, given = (
            [[getattr(s, side) for s in along] for along in zip(*shares, strict=True)]
            for side in ("ahead", "behind", "given")
        )
        every = [x for side in (ahead, behind, given) for along in side for x in along]
        if not all(map(math.isfinite, every)):
            return None
        scale = max(abs(x) for side in (ahead, behind) for along in side for x in along)
        kinks = (abs(a - b) for two in zip(ahead, behind, strict=True)
                 for a, b in zip(*two, strict=True))  # fmt: skip
        if max(kinks) > EQUAL * scale + least:
            return None
        if max(map(abs, every)) <= least:
            return None
        slopes = [
            [(a + b) / 2 / step for a, b in zip(*two, strict=True)]
            for two in zip(ahead, behind, strict=True)
        ]
        return _Told(slopes=slopes, given=[[x / step for x in along] for along in given])


def _adjoint(
    mine: Applied | None, ranks: Sequence[int], moved: Sequence[Moved], told: _Told | None
) -> Iterator[Adjoint]:
    """Of a call of this rank, if it was told."""
    if mine is None or told is None:
        return
    arguments = sorted({at for at, _ in moved})
    holders = sorted({rank for _, own in moved for rank in own})
    at_holders = [ranks.index(rank) for rank in holders]
    yield Adjoint(
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
    )


def _can_be_told(one: Applied) -> bool:
    """Whether its backward ran, and all of it is on CPUs."""
    tensors = [t for t in (*one.given, *one.gave) if isinstance(t, Tensor)]
    return one.came is not None and all(t.device.type == "cpu" for t in tensors)


def _shared(peers: Sequence[Mapping[Key, frozenset[int]]]) -> list[tuple[Key, tuple[int, ...]]]:
    """The calls that ranks run together, with these ranks; some of each line and Function, and not
    those that need others, too."""
    of_line: dict[tuple[str, ...], int] = {}
    of_function: dict[str, int] = {}
    found: list[tuple[Key, tuple[int, ...]]] = []
    for key in sorted({key for own in peers for key in own}, key=lambda k: (k[3], k)):
        ranks = tuple(rank for rank, own in enumerate(peers) if key in own)
        needed = {r for rank in ranks for r in peers[rank][key]}
        often = of_line.get(key[:3], 0), of_function.get(key[0], 0)
        if len(ranks) == 1 or not needed <= {*ranks}:
            continue
        if often[0] < MOST_CALLS and often[1] < MOST_OF_A_FUNCTION and len(found) < MOST_IN_ALL:
            of_line[key[:3]], of_function[key[0]] = often[0] + 1, often[1] + 1
            found.append((key, ranks))
    return found


def _arguments(one: Applied) -> list[Tensor | None] | None:
    """Those that something was, or had to be, given for; None where its forward, run again, gives
    something else than in the step."""
    again = is_as_it_was(one, run_again(one, {}))
    return [_argument(one, at) for at in range(len(one.given))] if again else None


def _argument(one: Applied, at: int) -> Tensor | None:
    value = one.given[at]
    if not isinstance(value, Tensor) or value.dtype != torch.float64 or not value.requires_grad:
        return None
    may_be_elsewhere = one.leaves[at] and _gave(one, at) is None
    return None if may_be_elsewhere or not value.numel() else value.detach()


def _gave(one: Applied, at: int) -> Tensor | None:
    """What its backward gave for an argument."""
    assert one.came is not None
    return one.came[1][sum(isinstance(value, Tensor) for value in one.given[:at])]


def _can_be_moved(held: Mapping[int, Sequence[Tensor | None] | None]) -> list[Moved]:
    """Arguments, with the ranks that hold the same; nothing where a rank's call is another."""
    own = [values for values in held.values() if values is not None]
    if len(own) < len(held) or len({len(values) for values in own}) != 1:
        return []
    return [
        (at, ranks)
        for at, values in enumerate(zip(*own, strict=True))
        for ranks in _alike(dict(zip(held, values, strict=True)))
    ]


def _alike(held: Mapping[int, Tensor | None]) -> list[tuple[int, ...]]:
    """The ranks that hold something, by what they hold."""
    groups: list[tuple[Tensor, list[int]]] = []
    for rank, value in held.items():
        if value is None:
            continue
        same = next((own for other, own in groups if _is_same(value, other)), None)
        if same is None:
            groups.append((value, [rank]))
        else:
            same.append(rank)
    return [tuple(own) for _, own in groups]


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= SAME * float(a.abs().max())


def _along(one: Applied, rank: int, moved: Sequence[Moved], number: int) -> _Share:
    """Its forward run twice, with the others'; it moves what it is a holder of."""
    assert one.came is not None
    steps: dict[int, Tensor] = {}
    given = longest = 0.0
    for at, holders in moved:
        value = one.given[at]
        length = step_of(value) if rank in holders else 0.0
        if length:
            seed = 1000 * number + 100 * at + holders[0]
            generator = torch.Generator().manual_seed(seed)
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


def _against(outer: Sequence[Tensor | None], a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(
        float((g * (x - y)).sum())
        for g, x, y in zip(outer, a, b, strict=True)
        if g is not None and x.is_floating_point()
    )
