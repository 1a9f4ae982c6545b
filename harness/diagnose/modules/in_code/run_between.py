"""What ranks ran between what is right and a value that is wrong: back from the value, line by
line, through what other ranks sent, added up or put side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.record.computed import LARGE, Change, Computation, same_value
from sumgrad.record.line import NO_LINE
from torch import Tensor

OPTION = re.compile(r"(\w+)=([-\w.]+)")  # of a number or a word
WRITES = "setitem"
MOST_RUN = 64  # computations on the way back: more are no hint
CLOSE = 1e-9  # of the largest number
STEPS_INTO_TERMS = 3  # of a sum that is wrong, each of whose terms is there as it is
FEWEST = 2  # different numbers that are no chance
FEWEST_WHOLE = 3  # the same, of whole numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A computation on the way. steps: how many come after it. first: all that it takes is the
    single process's, and what it gives is not. options: what such a one is called with and what the
    same call there is, `n=10` and `n=20`."""

    rank: int
    made: Computation
    steps: int
    first: bool = False
    options: tuple[str, str] | None = None


class RunBetween:
    """Of what ranks' lines computed."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._states = lines, lines.states
        self._ranks = {rank: lines.computed(rank) for rank in lines.states.ranks}
        self._whole = [
            v for v in lines.single.values if not v.is_floating_point() and v.numel() > 1
        ]

    def number_of(self, rank: int, value: Tensor, calls: int) -> int | None:
        """The number of a rank's value that equals this one: of those that were given before so
        many of its calls, the last, or the only one that was taken."""
        mine = self._ranks[rank]
        alike = {n for n, v in enumerate(mine.values) if same_value(v, value)}
        given = [n for c in mine.computations if c.calls <= calls for n in c.gives if n in alike]
        taken = [t for c in mine.computations for t in c.takes
                 if isinstance(t, int) and t in alike]  # fmt: skip
        found = given[-1:] or taken[:1]
        return found[0] if found else None

    def back_from(self, rank: int, number: int) -> list[Run]:
        """The latest first; nothing where it is too much to be a hint."""
        todo = [(rank, number, 0, 0)]  # the last: so many more steps, though it is right
        seen, out = {(rank, number)}, dict[tuple[int, int], Run]()
        while todo and len(out) <= MOST_RUN:
            at, value, steps, more = todo.pop(0)
            if self._is_right(at, value) and not more:
                continue
            place, before = self._maker(at, value), list[tuple[int, int]]()
            if place is None and (change := self._change(at, value)) is not None:
                out[at, -1 - value] = self._changed(at, change, steps)
                before, steps = [(at, change.before)], steps + 1
            elif place is None:
                before = list(self._brought(at, value))
            if place is not None and (at, place) not in out:
                out[at, place] = self._run(at, place, steps)
                made = out[at, place].made
                terms = list(self._terms(at, made))
                before = terms or [(at, t) for t in made.takes if isinstance(t, int)]
                odd = bool(terms) and all(self._is_right(r, n) for r, n in terms)
                steps, more = steps + 1, STEPS_INTO_TERMS if odd else max(more - 1, 0)
            todo += [(r, n, steps, more) for r, n in before if (r, n) not in seen]
            seen.update(before)
        return sorted(out.values(), key=lambda run: run.steps) if len(out) <= MOST_RUN else []

    def _change(self, rank: int, number: int) -> Change | None:
        """What a line wrote into to make it, where no line gives it."""
        changes = self._ranks[rank].changes
        return next((c for c in changes if c.after == number and c.before != number), None)

    def _changed(self, rank: int, change: Change, steps: int) -> Run:
        made = Computation(function=WRITES, line=change.line, code=change.code,
                           takes=(change.before,), made_at=(NO_LINE,),
                           gives=(change.after,))  # fmt: skip
        return Run(rank=rank, made=made, steps=steps)

    def _terms(self, rank: int, made: Computation) -> Iterator[tuple[int, int]]:
        """Of a Function that adds up over ranks, or puts side by side, what it takes, and gives
        what is wrong: the terms, each of which may be numbers that are there."""
        if made.written and len(made.gives) == 1 and self._is_wrong(rank, made):
            yield from self._together(rank, self._ranks[rank].values[made.gives[0]], made.takes)

    def _run(self, rank: int, place: int, steps: int) -> Run:
        made = self._ranks[rank].computations[place]
        taken = [t for t in made.takes if isinstance(t, int)]
        large = any(isinstance(t, str) and t.startswith(LARGE) for t in made.takes)
        told = all(self._is_right(rank, t) or self._is_given(rank, t) for t in taken)
        first = bool(taken) and told and not large and self._is_wrong(rank, made)
        options = self._other_options(made) if first else None
        return Run(rank=rank, made=made, steps=steps, first=first, options=options)

    def _other_options(self, made: Computation) -> tuple[str, str] | None:
        every = [c.takes for c in self._lines.single.computations
                 if (c.site, c.function) == (made.site, made.function)]  # fmt: skip
        for at, own in enumerate(made.takes):
            there = {str(takes[at]) for takes in every if len(takes) == len(made.takes)}
            option = OPTION.fullmatch(str(own))
            other = OPTION.fullmatch(there.pop()) if len(there) == 1 else None
            if option and other and option[1] == other[1] and option[2] != other[2]:
                return option[0], other[0]
        return None

    def _is_wrong(self, rank: int, made: Computation) -> bool:
        return any(self._states.forward(rank, n) == "wrong" for n in made.gives)

    def _is_right(self, rank: int, number: int) -> bool:
        """Of whole numbers by value, of others as a slice or as a part."""
        value = self._ranks[rank].values[number]
        if value.is_floating_point():
            return self._states.forward(rank, number) in ("right", "part")
        told = len(value.unique()) >= FEWEST_WHOLE
        return told and any(same_value(value, whole) for whole in self._whole)

    def _is_given(self, rank: int, number: int) -> bool:
        """Whether it has no digits that could be wrong, and no line makes it: a mask, a shape."""
        value = self._ranks[rank].values[number]
        return value.numel() <= 1 and self._maker(rank, number) is None

    def _maker(self, rank: int, number: int) -> int | None:
        ways = self._lines.ways(rank)
        computations = self._ranks[rank].computations
        makers = [p for p in ways.gives.get(number, ()) if number not in computations[p].takes]
        found = [p for p in makers if "empty" not in computations[p].function]
        return found[0] if found else None

    def _brought(self, rank: int, number: int) -> Iterator[tuple[int, int]]:
        """Values of other ranks that this one is, or is made of: what was sent, added up or put
        side by side."""
        value = self._ranks[rank].values[number]
        if not value.is_floating_point() or len(value.unique()) < FEWEST:
            return
        made = {r: given for r in self._ranks if (given := self._given(r, value)) is not None}
        if made:
            # Of several with the same, as replicas, nothing tells which of them sent it.
            alike = len({site for _, site in made.values()}) == 1 and rank not in made
            yield from ((r, n) for r, (n, _) in made.items() if alike)
            return
        yield from self._together(rank, value, range(len(self._ranks[rank].values)))

    def _given(self, rank: int, value: Tensor) -> tuple[int, str] | None:
        """The number of a rank's value that equals it, and the call in the code that made it and
        does not only hand it on."""
        computed = self._ranks[rank]
        for c in computed.computations:
            for n in (n for n in c.gives if same_value(computed.values[n], value)):
                taken = (computed.values[t] for t in c.takes if isinstance(t, int))
                if not any(same_value(t, value) for t in taken):
                    return n, c.site
        return None

    def _together(
        self, rank: int, value: Tensor, numbers: Iterable[int | str]
    ) -> Iterator[tuple[int, int]]:
        """The same call's results on all ranks of a group, whose sum it is, or which stand side by
        side in it; of this rank's values with these numbers."""
        values = self._ranks[rank].values
        for group in (g for g in self._states.sets if rank in g and len(g) > 1):
            for number in (n for n in numbers if isinstance(n, int)):
                own = values[number]
                if own.dtype != value.dtype or len(_unlike(own, value)) > 1:
                    continue
                held = {rank: number, **dict(self._states.same_call(rank, number))}
                terms = [self._ranks[r].values[held[r]] for r in group if r in held]
                if len(terms) == len(group) and _is_made_of(value, terms):
                    yield from ((r, held[r]) for r in group)
                    return


def _unlike(a: Tensor, b: Tensor) -> list[int]:
    """The dimensions in which two shapes differ: all, where they have not as many."""
    if a.dim() != b.dim():
        return list(range(max(a.dim(), b.dim(), 2)))
    return [d for d in range(a.dim()) if a.shape[d] != b.shape[d]]


def _is_made_of(value: Tensor, terms: Sequence[Tensor]) -> bool:
    """Whether it is their sum, or they stand side by side in it, in this order."""
    if any(t.dtype != value.dtype for t in terms):
        return False
    near = CLOSE * float(value.abs().max())
    if all(t.shape == value.shape for t in terms):
        return torch.allclose(sum(terms, torch.zeros_like(value)), value, rtol=0, atol=near)
    dims = {d for t in terms for d in _unlike(t, value)}
    if len(dims) != 1:
        return False
    (dim,) = dims
    whole = sum(t.shape[dim] for t in terms) == value.shape[dim]
    return whole and torch.allclose(torch.cat([*terms], dim), value, rtol=0, atol=near)
