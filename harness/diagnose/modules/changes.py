"""What may be tried in a failing step: sums over ranks, detaches, at lines that may want them.

A line may want one where what it gives is not known to be right and ranks have it unlike, or where
what it takes is right and gets a gradient that is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from sumgrad.base.files import is_librarys
from sumgrad.diagnose.modules.inverses import OF_PRODUCTS, PARTS_JOINED
from sumgrad.diagnose.modules.lines import Lines
from sumgrad.diagnose.modules.made_by import SHAPING
from sumgrad.diagnose.modules.value_states import gradient_of
from sumgrad.record.computed import MODULE, Computation, Computed
from sumgrad.record.trial import Change, Way
from torch import Tensor

MOST_CHANGES = 40  # each is a step of all ranks
# In which order a forward's, and a backward's, states are tried: a part is what lacks a sum.
SUSPECT = {"part": 0, "wrong": 1, "untold": 2}
PEAKS: Mapping[str, Way] = {
    "max": "largest", "amax": "largest", "maximum": "largest",
    "min": "smallest", "amin": "smallest", "minimum": "smallest",
}  # fmt: skip
# Functions with numbers that may be those of a whole, or of a part, and which: a count, groups.
OF_NUMBERS = {"mul": (0, 1), "div": (0, 1), "rdiv": (1,), "pow": (1,), "group_norm": (1,)}
LINEAR = {"add", "sub", "rsub", "neg", "sum", "mean", "mul", "div", *SHAPING, *PARTS_JOINED}
Axes = Mapping[str, Sequence[Sequence[int]]]


def changes_of(lines: Lines, axes: Axes, pairs: Set[frozenset[int]]) -> list[Change]:
    """Those to try first at the front. axes: name of one, or "" for all of them together, -> its
    groups of ranks. pairs: of ranks that send each other something: one may wait for the other
    where a sum has both wait, too."""
    waits = {axis for axis, groups in axes.items()
             if any(pair <= {*group} for group in groups for pair in pairs)}  # fmt: skip
    return _Changes(lines, axes).in_order(waits)


@dataclass(frozen=True, slots=True)
class _Ways:
    """Numbers of values of which something with a gradient is made, and of those of which something
    is made that is no sum of them and of what no gradient passes."""

    ends: Set[int]
    bent: Set[int]


def _ways(mine: Computed) -> _Ways:
    ends, bent = {*mine.with_graph}, set[int]()
    for c in reversed(mine.computations):
        if not ends.isdisjoint(c.gives):
            ends.update(c.uses)
        if c.gives and (_bends(c, mine) or not bent.isdisjoint(c.gives)):
            bent.update(c.uses)
    return _Ways(ends, bent)


def _bends(c: Computation, mine: Computed) -> bool:
    """Whether what it gives is no sum of what gradients pass, each but for a factor."""
    passed = [t for t in c.takes if isinstance(t, int) and t in mine.with_graph]
    several = c.function in ("mul", "div") and len(passed) > 1
    below = c.function == "div" and not mine.with_graph.isdisjoint(c.takes[1:])
    return c.function not in LINEAR or several or below


class _Changes:
    def __init__(self, lines: Lines, axes: Axes) -> None:
        self._lines, self._states, self._axes = lines, lines.states, axes
        self._runs: dict[tuple[int, str], list[Computation]] = {}
        self._known: dict[tuple[str, str, int, bool], bool | None] = {}
        self._kept: dict[str, bool] = {}
        self._ways = {rank: _ways(lines.computed(rank)) for rank in lines.states.ranks}
        for rank in lines.states.ranks:
            for c in lines.computed(rank).computations:
                self._runs.setdefault((rank, _key(c)), []).append(c)

    def in_order(self, waits: Set[str]) -> list[Change]:
        """waits: axes whose sums come late."""
        found: dict[Change, tuple[int, int, int, int]] = {}
        for rank in self._states.ranks:
            for place, c in enumerate(self._lines.computed(rank).computations):
                if not self._can_be_changed(rank, c):
                    continue
                there = int(self._lines.is_run_there(c))
                for suspect, change in self._at(rank, c):
                    # A detach may leave a step without what it goes on with.
                    late = 1 if change.way == "detach" else 2 * (_sums(change, waits))
                    key = late, suspect + self._takes_wrong(rank, c), there, -place
                    found[change] = min(found.get(change, key), key)
        return sorted(found, key=lambda change: found[change])[:MOST_CHANGES]

    def _can_be_changed(self, rank: int, c: Computation) -> bool:
        """A user's call of a torch function, or of a module of torch's own, of which something is
        made that has a gradient."""
        if c.function_of or c.written or not _key(c) or is_librarys(c.line) or not c.gives:
            return False
        return not self._ways[rank].ends.isdisjoint(c.gives)

    def _at(self, rank: int, c: Computation) -> Iterator[tuple[int, Change]]:
        """Changes, each with how soon it is to be tried."""
        if c.function == "detach":
            yield 0, _change(c, "attach")
            return
        mine = self._lines.computed(rank)
        if len(c.gives) == 1 and mine.values[c.gives[0]].dtype == torch.float64:
            given = c.gives[0]
            # A largest of some numbers is one of them, and looks right.
            usual = SUSPECT["wrong"] if c.function in PEAKS else None
            suspect = SUSPECT.get(self._states.forward(rank, given), usual)
            ways: list[Way] = ["sum", "sum_both"] if given in mine.with_graph else ["sum"]
            ways = [PEAKS[c.function]] if c.function in PEAKS else ways
            # The sum over ranks of what only adds up to a loss changes no gradient.
            adds_up = given in mine.with_graph and given not in self._ways[rank].bent
            for axis in () if suspect is None or adds_up else self._unlike(c, -1):
                for way in ways:
                    yield suspect or 0, _change(c, way, axis=axis)
            if suspect is not None and not c.function.startswith(MODULE):
                yield from ((suspect, change) for change in self._once(c))
                yield from ((suspect + 1, change) for change in self._of_numbers(rank, c))
        yield from self._from_elsewhere(rank, c)
        if all(gradient_of(mine, n) is None for n in c.gives):
            return
        of_module = c.function.startswith(MODULE)
        for at, taken in enumerate(c.takes[:1] if of_module else c.takes):
            if not isinstance(taken, int) or taken not in mine.with_graph:
                continue
            suspect = SUSPECT.get(self._states.backward(rank, taken))
            if suspect is None or self._states.forward(rank, taken) not in ("right", "untold"):
                continue
            for axis in self._unlike(c, at, gradients=True):
                yield suspect, _change(c, "sum_back", axis=axis, at=at)
            if of_module or suspect == SUSPECT["untold"]:
                continue
            if self._is_one_of_several(rank, c, taken):
                yield suspect + 1, _change(c, "detach", at=at)

    def _once(self, c: Computation) -> Iterator[Change]:
        """With what all ranks add to what each has a part of as a share of it: a sum that follows
        counts it once for each."""
        if c.function not in ("add", "sub") or len(c.takes) != 2:
            return
        for at, taken in enumerate(c.takes):
            if not isinstance(taken, int) or not isinstance(c.takes[1 - at], int):
                continue
            for axis, groups in self._axes.items():
                size, *others = {len(g) for g in groups}
                alike = [self._held_alike(axis, c, i, False) for i in (at, 1 - at)]
                if not others and alike == [True, False]:
                    yield _change(c, "once", axis=axis, at=at, by=1 / size)

    def _from_elsewhere(self, rank: int, c: Computation) -> Iterator[tuple[int, Change]]:
        """With the sum of what no line gives, as of a derivative, or of what another rank sent."""
        mine, given = self._lines.computed(rank), self._lines.ways(rank).gives
        for at, taken in enumerate(c.takes):
            if not isinstance(taken, int) or taken in given or c.function.startswith(MODULE):
                continue
            suspect = SUSPECT.get(self._states.forward(rank, taken))
            if suspect is None or mine.values[taken].dtype != torch.float64:
                continue
            ways: list[Way] = ["sum", "sum_both"] if taken in mine.with_graph else ["sum"]
            for axis in self._unlike(c, at):
                yield from ((suspect, _change(c, way, axis=axis, at=at)) for way in ways)

    def _of_numbers(self, rank: int, c: Computation) -> Iterator[Change]:
        """With a number in it times the size of an axis, or by it; and left out, where that leaves
        the shape."""
        mine = self._lines.computed(rank)
        sizes = {len(g) for axis, groups in self._axes.items() if axis for g in groups}
        for at in OF_NUMBERS.get(c.function, ()):
            taken = c.takes[at] if at < len(c.takes) else 0
            if isinstance(taken, str) and _is_number(taken):
                for size in sorted(sizes - {1}):
                    yield _change(c, "number", at=at, by=1 / size)
                    yield _change(c, "number", at=at, by=float(size))
        first = c.takes[0]
        if isinstance(first, int) and first in mine.with_graph and self._keeps_shapes(_key(c)):
            yield _change(c, "skip")

    def _keeps_shapes(self, key: str) -> bool:
        """Whether each of its calls on every rank gives another tensor, of the shape of the first
        that it takes."""
        if key not in self._kept:
            self._kept[key] = all(
                _keeps_shape(c, self._lines.computed(rank))
                for rank in self._states.ranks
                for c in self._runs.get((rank, key), ())
            )
        return self._kept[key]

    def _takes_wrong(self, rank: int, c: Computation) -> int:
        """How much later what takes something is tried that is wrong already."""
        wrong = any(isinstance(t, int) and self._states.forward(rank, t) == "wrong"
                    for t in c.takes)  # fmt: skip
        return len(SUSPECT) * wrong

    def _is_one_of_several(self, rank: int, c: Computation, taken: int) -> bool:
        """Whether a gradient may come back another way, too: through what else a line takes, or
        through what else takes the same."""
        mine = self._lines.computed(rank)
        beside = any(isinstance(t, int) and t != taken and t in mine.with_graph for t in c.takes)
        return beside or len(self._lines.ways(rank).takes.get(taken, ())) > 1

    def _unlike(self, c: Computation, at: int, *, gradients: bool = False) -> Iterator[str]:
        """Axes over whose ranks what it gives, or argument `at`, or the gradient of that, can be
        summed, and is not alike: else a sum is a factor."""
        yield from (
            axis for axis in self._axes if self._held_alike(axis, c, at, gradients) is False
        )

    def _held_alike(self, axis: str, c: Computation, at: int, gradients: bool) -> bool | None:
        """Whether the ranks of each group have the same there in all its calls; None where they
        have other shapes, or call it more or less often: then some wait for what never comes."""
        key = axis, _key(c), at, gradients
        if key not in self._known:
            self._known[key] = self._are_alike(*key)
        return self._known[key]

    def _are_alike(self, axis: str, key: str, at: int, gradients: bool) -> bool | None:
        alike = True
        for group in self._axes[axis]:
            held = [[*self._held(rank, key, at, gradients)] for rank in group]
            if len(held) < 2 or len({len(own) for own in held}) > 1 or not held[0]:
                return None
            for own in zip(*held, strict=True):
                known = [v for v in own if v is not None]
                if len(known) < len(own) or len({v.shape for v in known}) > 1:
                    return None
                alike = alike and all(torch.equal(known[0], v) for v in known)
        return alike

    def _held(self, rank: int, key: str, at: int, gradients: bool) -> Iterator[Tensor | None]:
        mine = self._lines.computed(rank)
        for c in self._runs.get((rank, key), ()):
            number = c.takes[at] if 0 <= at < len(c.takes) else next(iter(c.gives), "")
            if not isinstance(number, int):
                yield None
            else:
                yield gradient_of(mine, number) if gradients else mine.values[number]


def _key(c: Computation) -> str:
    """Which call in the code it is, or of which module."""
    return c.site or (c.function if c.function.startswith(MODULE) else "")


def _keeps_shape(c: Computation, mine: Computed) -> bool:
    first, given = c.takes[0], next(iter(c.gives), None)
    if not isinstance(first, int) or given is None or given == first or c.function in OF_PRODUCTS:
        return False
    one, other = mine.values[first], mine.values[given]
    return one.shape == other.shape and one.dtype == other.dtype


def _change(c: Computation, way: Way, *, axis: str = "", at: int = -1, by: float = 1.0) -> Change:
    return Change(site=c.site, function=c.function, way=way, axis=axis, at=at, by=by)


def _sums(change: Change, axes: Set[str]) -> bool:
    return change.axis in axes and change.way in (
        "sum",
        "sum_both",
        "sum_back",
        "largest",
        "smallest",
    )


def _is_number(words: str) -> bool:
    try:
        float(words.rpartition("=")[2])
    except ValueError:
        return False
    return True
