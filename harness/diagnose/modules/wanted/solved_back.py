"""What a line that ranks alone run would have to be given for what follows it to be right.

Where it ends, a line that the single process runs, too, takes what was made there, and what it has
to be is known: the single process's, at the same rows and places. From there back, function by
function, each argument is solved for with all others as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from sumgrad.base.files import is_librarys
from sumgrad.diagnose.modules.in_code.followed import followed, ways_of
from sumgrad.diagnose.modules.in_code.made_by import SHAPING
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.diagnose.modules.values.value_states import ValueStates, gradient_of
from sumgrad.diagnose.modules.wanted.across_ranks import how_across
from sumgrad.diagnose.modules.wanted.how_apart import ENOUGH, How, how_apart, is_apart
from sumgrad.diagnose.modules.wanted.inverses import (
    PARTS_JOINED,
    Needed,
    moved_back,
    needed,
    other_way,
)
from sumgrad.diagnose.modules.wanted.keys_needed import keys_needed
from sumgrad.record.computed import MODULE, Computation, Computed
from sumgrad.record.trace import Traces
from torch import Tensor

MOST_GUIDES = 6  # values that may tell which rows and places one is of
MOST_ENDS = 8
MOST_TRIED = 256  # values of which it is asked what they have to be, until those are found
MOST_STEPS = 48  # functions that are solved for on the way back from one end
MASKS = {"masked_fill", "masked_fill_"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """Argument `at` of a rank's computation: were it what it needs to be, the end would be right.

    at: -1 where it is what the function gives. mine, place: the computation. is_: what it is.
    end: what is known to be wrong because of it. alone: nothing else that is put together with it
    is wrong.
    """

    rank: int
    mine: Computation
    place: int
    at: int
    how: How
    is_: Tensor
    need: Needed
    end: _End
    alone: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """What a computation takes or gives, and has to be, as the single process's value `its` is.
    again: it runs there as often as here, or here some times as often. of: the value whose gradient
    would be right then, where that is known, and not what the value has to be; spare: as in Needed.
    """

    at: Computation
    number: int
    its: int
    wanted: Tensor
    again: bool
    of: int | None = None
    spare: int = 0

    @property
    def enters(self) -> bool:
        return self.number in self.at.takes


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A value that has to be another. spare: as in Needed, of all on the way to it."""

    number: int
    wanted: Tensor
    spare: int = 0
    alone: bool = True


class SolvedBack:
    def __init__(self, traces: Traces, states: ValueStates) -> None:
        self._ranks = {rank: trace.computed for rank, trace in traces.ranks.items()}
        self._single = traces.single.computed
        self._states = states
        self._single_ways = ways_of(self._single)
        self._ways = {rank: ways_of(c) for rank, c in self._ranks.items()}
        self._at_site: dict[tuple[str, str], list[Computation]] = {}
        for c in self._single.computations:
            self._at_site.setdefault((c.site, c.function), []).append(c)
        self._there = Numbers(self._single.values)

    def solved(self, rank: int, asked: Callable[[Computation], bool]) -> list[Solved]:
        """Of the first end that tells anything, of those that are asked for; from there back."""
        for end in islice(self._ends(rank, asked), MOST_ENDS):
            found = [
                one
                for one in self._back(rank, end)
                if one.how.there != end.its
                and self._is_of_ranks_alone(one)
                and not self._is_no_news(one)
                and (end.again or one.need.spare >= ENOUGH)
            ]
            if found:
                return found
        return []

    def solved_gradients(self, rank: int) -> list[Solved]:
        """The same of a number that no gradient passes, and with which a line multiplies what gets
        a wrong one: what it has to be for the gradient to be the single process's."""
        for end in islice(self._ends_of_gradients(rank), MOST_ENDS):
            found = [one for one in (*self._itself(rank, end), *self._back(rank, end))
                     if one.how.kind == "ranks"]  # fmt: skip
            if found:
                return found
        return []

    def _ends_of_gradients(self, rank: int) -> Iterator[_End]:
        """From the loss down, what is right and gets a wrong gradient, where one line alone
        multiplies it, by what has none."""
        mine, ways, states = self._ranks[rank], self._ways[rank], self._states
        for c in reversed(mine.computations):
            if c.function not in ("mul", "div") or len(c.takes) != 2 or len(c.gives) != 1:
                continue
            out = gradient_of(mine, c.gives[0])
            for at in (0, 1) if c.function == "mul" else (0,):
                value, by = c.takes[at], c.takes[1 - at]
                if not isinstance(value, int) or not isinstance(by, int) or out is None:
                    continue
                if by in mine.with_graph or value not in mine.with_graph:
                    continue
                users = [p for p in ways.takes.get(value, ())
                         if not mine.with_graph.isdisjoint(mine.computations[p].gives)]  # fmt: skip
                wrong = states.forward(rank, value) == "right" and (
                    states.backward(rank, value) == "wrong"
                )
                wanted = self._gradient_there(rank, value) if wrong and len(users) == 1 else None
                if wanted is None or wanted.shape != out.shape:
                    continue
                weights = mine.values[by]
                gave = out * weights if c.function == "mul" else out / weights
                need = needed(c.function, (out, weights), 1, gave, wanted)
                if need is not None and is_apart(weights, need.value):
                    yield _End(c, by, -1, need.value, again=True, of=value, spare=need.spare)

    def _gradient_there(self, rank: int, number: int) -> Tensor | None:
        """The single process's gradient of a rank's value, element by element."""
        value = self._ranks[rank].values[number]
        for other in self._states.alike(value):
            gradient = gradient_of(self._single, other)
            places = None if gradient is None else self._there.places(value, other)
            if gradient is None or places is None or len(places[0]) < value.numel():
                continue
            wanted = torch.empty(value.numel(), dtype=gradient.dtype)
            wanted[places[0]] = gradient.reshape(-1)[places[1]]
            return wanted.reshape(value.shape)
        return None

    def _itself(self, rank: int, end: _End) -> Iterator[Solved]:
        """What the end takes, as one that has to be another."""
        need = Needed(value=end.wanted, spare=end.spare)
        told, own = self._of_ranks(rank, end.number, need), self._ranks[rank].values[end.number]
        if told is not None:
            place = self._ways[rank].takes[end.number][0]
            yield Solved(rank=rank, mine=end.at, place=place, at=end.at.takes.index(end.number),
                         how=told, is_=own, need=need, end=end)  # fmt: skip

    def _is_of_ranks_alone(self, one: Solved) -> bool:
        """Whether the line is none of the single process's, nor what makes the argument, which is
        not known to be right, or a number beside it may be another.

        Else a line that takes what is right is accused of what is missing behind it; but for what a
        mask does, and for functions done in another way.
        """
        c, mine = one.mine, self._ranks[one.rank]
        if (
            one.how.kind in ("way", "keys", "order", "ranks")
            or (c.site, c.function) not in self._at_site
        ):
            return True
        taken = c.takes[one.at]
        maker = _maker(mine, self._ways[one.rank].gives, taken)
        own = maker is None or (maker.site, maker.function) not in self._at_site
        if own and isinstance(taken, int) and self._states.forward(one.rank, taken) != "right":
            return True
        numbers = any(isinstance(t, str) and _number(t) is not None for t in c.takes)
        users = numbers and not is_librarys(c.line)
        return users or bool(one.need.value.isneginf().any())

    def _is_no_news(self, one: Solved) -> bool:
        """Whether the same line of the single process takes just that, and nothing but the value
        itself tells that it has to be that one."""
        if one.how.kind != "there" or one.need.spare >= ENOUGH:
            return False
        want = one.need.value[~one.need.value.isnan()]
        return any(
            isinstance(t, int) and self._there.has_all(want, t)
            for w in self._at_site.get((one.mine.site, one.mine.function), ())
            for t in w.takes
        )

    def _ends(self, rank: int, asked: Callable[[Computation], bool]) -> Iterator[_End]:
        """Values that are wrong and what they have to be, which is one of the single process's."""
        mine, seen = self._ranks[rank], set[tuple[int, int]]()
        every = Counter((c.site, c.function) for c in mine.computations)
        times = Counter[tuple[str, str]]()
        for c in mine.computations:
            key = c.site, c.function
            nth = times[key]
            times[key] += 1
            there = self._at_site.get(key, ())
            if not asked(c) or not there:
                continue
            again = every[key] % len(there) == 0  # in each micro-batch once more, or in its own way
            for w in there[nth % len(there) :][:1] if again else there:
                pairs = [*zip(c.takes, w.takes, strict=False), *zip(c.gives, w.gives, strict=False)]
                for number, its in pairs:
                    if not isinstance(number, int) or not isinstance(its, int):
                        continue
                    module = c.function.startswith(MODULE)
                    if (number, its) in seen or (
                        not module and self._states.forward(rank, number) != "wrong"
                    ):
                        continue
                    seen.add((number, its))
                    if len(seen) > MOST_TRIED:
                        return
                    index = self._index(rank, number, its)
                    if index is None:
                        continue
                    wanted = self._single.values[its].reshape(-1)[index]
                    if is_apart(mine.values[number], wanted):
                        yield _End(c, number, its, wanted, again)

    def _index(self, rank: int, number: int, its: int) -> Tensor | None:
        """Which elements of one of the single process's values those of a rank's have to be, by
        what is right of what both were made of."""
        mine, whole = self._ranks[rank], self._single.values[its]
        value = mine.values[number]
        if value.dim() != whole.dim() or not value.dim() or not value.is_floating_point():
            return None
        before = followed([number], self._ways[rank].gives, lambda p: mine.computations[p].uses)
        known = {*followed([its], self._single_ways.gives,
                           lambda p: self._single.computations[p].uses)}  # fmt: skip
        asked = 0
        for guide in before:
            tensor = mine.values[guide]
            alike = tensor.shape[:-1] == value.shape[:-1] and tensor.dim() == value.dim() > 1
            if not alike and tensor.shape != value.shape:
                continue
            if self._states.forward(rank, guide) != "right":
                continue
            asked += 1
            if asked > MOST_GUIDES:
                return None
            for other in self._states.alike(tensor):
                if other not in known:
                    continue
                index = self._guided(tensor, value, other, whole)
                if index is not None:
                    return index
        return None

    def _guided(self, guide: Tensor, value: Tensor, other: int, whole: Tensor) -> Tensor | None:
        its = self._single.values[other]
        places = self._there.places(guide, other)
        if places is None or len(places[0]) < guide.numel():
            return None
        there = torch.empty(guide.numel(), dtype=torch.long)
        there[places[0]] = places[1]
        if guide.shape == value.shape and its.shape == whole.shape:
            return there.reshape(value.shape)
        if its.shape[:-1] != whole.shape[:-1] or value.shape[-1] != whole.shape[-1]:
            return None
        which = (there // its.shape[-1]).reshape(*guide.shape[:-1], guide.shape[-1])
        if bool((which != which[..., :1]).any()):
            return None
        return which[..., :1] * whole.shape[-1] + torch.arange(whole.shape[-1])

    def _back(self, rank: int, end: _End) -> Iterator[Solved]:
        """From a value that has to be another to what it was made of, breadth first."""
        mine, ways = self._ranks[rank], self._ways[rank]
        todo, seen = [_Asked(end.number, end.wanted, end.spare)], {end.number}
        for _ in range(MOST_STEPS):
            if not todo:
                return
            one = todo.pop(0)
            for place in ways.gives.get(one.number, ())[:1]:
                c = mine.computations[place]
                yield from self._in_another_way(rank, place, one, end)
                yield from self._over_other_keys(rank, place, one, end)
                wrong = [(at, n) for at, n in _needs(mine, c, one) if c.takes[at] not in seen]
                alone = one.alone and not (c.function in PARTS_JOINED and len(wrong) > 1)
                for at, need in wrong:
                    taken = c.takes[at]
                    assert isinstance(taken, int)
                    seen.add(taken)
                    whole = replace(need, spare=need.spare + one.spare)
                    todo.append(_Asked(taken, whole.value, whole.spare, alone))
                    own = mine.values[taken]
                    told = self._of_ranks(rank, taken, whole)
                    if told is None and c.function not in SHAPING:
                        told = how_apart(own, whole, self._there)
                    if told is not None:
                        yield Solved(rank=rank, mine=c, place=place, at=at, how=told, is_=own,
                                     need=whole, end=end, alone=alone)  # fmt: skip

    def _of_ranks(self, rank: int, number: int, need: Needed) -> How | None:
        """Where it has to be what the ranks of a group have there together, or another has."""
        for held in self._states.together(rank, number):
            values = [(r, self._ranks[r].values[n]) for r, n in held]
            if (told := how_across(values, rank, need)) is not None:
                return told
        return None

    def _in_another_way(self, rank: int, place: int, one: _Asked, end: _End) -> Iterator[Solved]:
        """Where the same function of the same arguments gives what is wanted in another way."""
        mine = self._ranks[rank]
        c = mine.computations[place]
        takes = [mine.values[t] if isinstance(t, int) else _number(t) for t in c.takes]
        way = "" if bool(one.wanted.isnan().any()) else other_way(c.function, takes, one.wanted)
        if way:
            need = Needed(value=one.wanted, spare=one.spare + one.wanted.numel())
            yield Solved(rank=rank, mine=c, place=place, at=-1, how=How("way", way=way), end=end,
                         is_=mine.values[one.number], need=need, alone=one.alone)  # fmt: skip

    def _over_other_keys(self, rank: int, place: int, one: _Asked, end: _End) -> Iterator[Solved]:
        """Where a softmax, and the product of it with values, has to go over other keys."""
        mine = self._ranks[rank]
        found = _attention(mine, self._ways[rank].gives, mine.computations[place])
        if found is None:
            return
        c, scores, shares, values = found
        keys = keys_needed(scores, shares, values, one.wanted)
        if keys is not None and bool(keys.wrong.any()):
            need = Needed(value=one.wanted, spare=one.spare + one.wanted.numel())
            yield Solved(rank=rank, mine=c, place=place, at=-1, how=How("keys", keys=keys), end=end,
                         is_=mine.values[one.number], need=need, alone=one.alone)  # fmt: skip


def _attention(
    mine: Computed, gives: dict[int, list[int]], c: Computation
) -> tuple[Computation, Tensor, Tensor, Tensor] | None:
    """The softmax that a product with values takes, its scores before a mask, what it gave, and the
    values; None where it is no such product."""
    first, second = (*c.takes[:2], "", "")[:2]
    if c.function != "matmul" or not isinstance(first, int) or not isinstance(second, int):
        return None
    maker = _maker(mine, gives, first)
    if maker is not None and maker.function == "dropout":
        maker = _maker(mine, gives, maker.takes[0])
    if maker is None or maker.function != "softmax" or not isinstance(maker.takes[0], int):
        return None
    scores, shares, values = (mine.values[n] for n in (maker.takes[0], first, second))
    masked = _maker(mine, gives, maker.takes[0])
    if masked is not None and masked.function in MASKS and isinstance(masked.takes[0], int):
        before = mine.values[masked.takes[0]]
        scores = before if before.shape == scores.shape else scores
    same = shares.shape == scores.shape and min(shares.dim(), values.dim()) > 1
    return (maker, scores.double(), shares, values) if same else None


def _maker(mine: Computed, gives: dict[int, list[int]], number: int | str) -> Computation | None:
    places = gives.get(number, []) if isinstance(number, int) else []
    return mine.computations[places[0]] if places else None


def _needs(mine: Computed, c: Computation, asked: _Asked) -> Iterator[tuple[int, Needed]]:
    """Of the arguments of a computation that have to be others, which and what."""
    given = [mine.values[t] if isinstance(t, int) else t for t in c.takes]
    moves = c.function in SHAPING or c.function in PARTS_JOINED
    for at, own in enumerate(given):
        if not isinstance(own, Tensor) or c.takes[at] == asked.number:
            continue
        if moves:
            which = c.gives.index(asked.number)
            found = moved_back(c.function, given, at, which, mine.values[asked.number],
                               asked.wanted)  # fmt: skip
        else:
            takes = [_number(t) if isinstance(t, str) else t for t in given]
            found = needed(c.function, takes, at, mine.values[asked.number], asked.wanted)
        if found is not None and is_apart(own, found.value):
            yield at, found


def _number(argument: str) -> float | None:
    try:
        return float(argument)
    except ValueError:
        return None
