"""What may be tried in a failing step: sums over ranks, detaches, at lines that may want them.

A line may want one where what it gives is not known to be right and ranks have it unlike, or where
what it takes is right and gets a gradient that is not.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import torch
from sumgrad.base.files import is_librarys
from sumgrad.diagnose.modules.in_code.calls_at import Axes, CallsAt, is_number, place_of
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.in_code.made_by import SHAPING
from sumgrad.diagnose.modules.trying.wholes import BOTH, Wholes
from sumgrad.diagnose.modules.values.value_states import gradient_of
from sumgrad.diagnose.modules.wanted.inverses import OF_PRODUCTS, PARTS_JOINED
from sumgrad.record.computed import MODULE, Computation, Computed
from sumgrad.record.trial import Change, Way

MOST_LOOKING_S = 3.0
MOST_CHANGES = 40  # each is a step of all ranks
FIRST_OF_LINES, MOST_OF_REDUCTIONS = 6, 6
SUMS_UP = "allreduce"
MOST_AT_ONCE, MOST_LAYERS = 4, 64  # lines of one function, modules, that are changed together
TURN = 4  # of one kind, before some of the next
KINDS = {"sum": "sum", "sum_both": "sum", "largest": "sum", "smallest": "sum", "sum_back": "back",
         "number": "number", "skip": "number"}  # fmt: skip
SEVERAL_LATER = 3  # than one line alone
ADDING_UP = {"sum", "mean", "dot", "einsum", "norm", "vector_norm", *OF_PRODUCTS}
Event = Mapping[str, Any]  # of the ledger
Soon = tuple[int, int, int, int, int]  # the smaller, the sooner a change is tried
WITH_BIAS = {"linear", "conv1d", "conv2d", "conv3d"}
PUTS = {"setitem", "scatter", "index_copy", "index_put", "copy"}  # in place of what is there
# What gives some of the numbers that it takes, which look right wherever they are.
PICKS = {"topk", "sort", "flip", "fliplr", "flipud", "roll", "rot90", "kthvalue", "median"}
# In which order a forward's, and a backward's, states are tried: a part is what lacks a sum.
SUSPECT = {"part": 0, "wrong": 1, "untold": 2}
PEAKS: Mapping[str, Way] = {
    "max": "largest", "amax": "largest", "maximum": "largest",
    "min": "smallest", "amin": "smallest", "minimum": "smallest",
}  # fmt: skip
# Functions with numbers that may be those of a whole, or of a part, and which: a count, groups.
OF_NUMBERS = {"mul": (0, 1), "div": (0, 1), "rdiv": (1,), "pow": (1,), "group_norm": (1,)}
LINEAR = {"add", "sub", "rsub", "neg", "sum", "mean", "mul", "div", *SHAPING, *PARTS_JOINED}


def changes_of(
    lines: Lines,
    axes: Axes,
    pairs: Set[frozenset[int]],
    kinds: Mapping[str, str],
    events: Mapping[int, Sequence[Event]],
    said: str = "",
) -> list[Change]:
    """Those to try first at the front. pairs: of ranks that send each other something: one may wait
    for the other where a sum has both wait, too. kinds: the classes of the modules. events: what
    each rank issues. said: of the cause, where lines that are named in it come first."""
    waits = {axis for axis, groups in axes.items()
             if any(pair <= {*group} for group in groups for pair in pairs)}  # fmt: skip
    of_lines = _Changes(lines, axes, kinds).in_order(waits, said)
    reductions = _of_reductions(events)
    otherwise = [
        Change(site=site, function=SUMS_UP, way=way)
        for site in reductions
        for way in ("unsummed", "averaged")
    ]
    firsts = [*of_lines[:FIRST_OF_LINES], *otherwise[:MOST_OF_REDUCTIONS]]
    # Over other ranks last: one whose tensors are no match for theirs may wait for ever.
    lasts = list(_over_others(reductions, axes))[:MOST_OF_REDUCTIONS]
    return [*firsts, *of_lines[FIRST_OF_LINES:]][: MOST_CHANGES - len(lasts)] + lasts


def _of_reductions(events: Mapping[int, Sequence[Event]]) -> dict[str, dict[int, list[Event]]]:
    """By the line, what each rank sums up there; not DDP's own, without which nothing is."""
    found: dict[str, dict[int, list[Event]]] = {}
    for rank, own in events.items():
        for event in filter(_is_changed, own):
            found.setdefault(event["site"], {}).setdefault(rank, []).append(event)
    return found


def _over_others(
    reductions: Mapping[str, Mapping[int, Sequence[Event]]], axes: Axes
) -> Iterator[Change]:
    """At one line, and before that at all of those that reduce over the same ranks."""
    alike: dict[frozenset[tuple[int, ...]], list[str]] = {}
    for site, of_ranks in reductions.items():
        sizes = {tuple(event["numel"] for event in own) for own in of_ranks.values()}
        groups = {tuple(event["group"]) for own in of_ranks.values() for event in own}
        everywhere = {rank for own in axes.values() for group in own for rank in group}
        if len(sizes) == 1 and {*of_ranks} == everywhere:
            alike.setdefault(frozenset(groups), []).append(site)
    ones = []
    for used, (first, *others) in alike.items():
        for axis in (axis for axis, own in axes.items() if used.isdisjoint(map(tuple, own))):
            one = Change(site=first, function=SUMS_UP, way="over", axis=axis)
            ones += [replace(one, site=site) for site in (first, *others)]
            if others:
                yield replace(one, also=tuple((site, SUMS_UP) for site in others))
    yield from ones


def _is_changed(event: Event) -> bool:
    of_several = isinstance(event["group"], list) and len(event["group"]) > 1
    is_float = str(event["dtype"]).startswith(("float", "bfloat"))
    sums = event["op"] == SUMS_UP and event.get("reduce", "SUM") == "SUM"
    return sums and of_several and is_float and "by" not in event


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
    def __init__(self, lines: Lines, axes: Axes, kinds: Mapping[str, str]) -> None:
        self._lines, self._states, self._axes = lines, lines.states, axes
        self._calls = CallsAt(lines, axes)
        self._wholes = Wholes(lines, self._calls, [*axes], kinds)
        self._kept: dict[str, bool] = {}
        self._until = time.monotonic() + MOST_LOOKING_S
        self._ways = {rank: _ways(lines.computed(rank)) for rank in lines.states.ranks}

    def in_order(self, waits: Set[str], said: str) -> list[Change]:
        """waits: axes whose sums come late. said: names lines that come first."""
        named = {*re.findall(r":(\d+)\b", said)}
        found: dict[Change, Soon] = {}
        within: dict[Change, tuple[str, str]] = {}
        for rank in self._states.ranks:
            for place, c in enumerate(self._lines.computed(rank).computations):
                if time.monotonic() > self._until:
                    break  # most lines are those of other ranks, too
                if c.function in PUTS and not (c.function_of or is_librarys(c.line)):
                    # Few, and no state tells of them: with those that are named.
                    put = _change(c, "added")
                    found.setdefault(put, (0, 0, SUSPECT["untold"], 0, -place))
                    within[put] = c.within, c.function
                if not self._can_be_changed(rank, c):
                    continue
                there = int(self._lines.is_run_there(c))
                file, _, line = c.line.rpartition(":")
                unsaid = int(line not in named or PurePath(file).name not in said)
                for suspect, change in self._at(rank, c):
                    # A detach may leave a step without what it goes on with.
                    late = 1 if change.way == "detach" else 2 * (_sums(change, waits))
                    key = late, unsaid, suspect + self._takes_wrong(rank, c), there, -place
                    found[change] = min(found.get(change, key), key)
                    within[change] = c.within, c.function
        found.update(_several_at_once(found, within))
        ordered = sorted(found, key=lambda change: found[change])
        soon = [change for change in ordered if not found[change][0]]
        of_named = [change for change in soon if not found[change][1]]
        of_others = [change for change in soon if found[change][1]]
        last = [change for change in ordered if found[change][0]]
        return [*_in_turns(of_named), *_in_turns(of_others), *last]

    def _can_be_changed(self, rank: int, c: Computation) -> bool:
        """A user's call of a torch function, or of a Function or a module of torch's own, of which
        something is made that has a gradient."""
        if c.function_of or not place_of(c) or is_librarys(c.line) or not c.gives:
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
            peak = _of_peaks(c)
            # A largest of some numbers is one of them, and looks right.
            usual = SUSPECT["wrong"] if peak else None
            suspect = SUSPECT.get(self._states.forward(rank, given), usual)
            ways: list[Way] = ["sum", "sum_both"] if given in mine.with_graph else ["sum"]
            ways = [peak] if peak else ways
            # The sum over ranks of what only adds up to a loss changes no gradient.
            adds_up = given in mine.with_graph and given not in self._ways[rank].bent
            for axis in () if suspect is None or adds_up else self._calls.unlike(c, -1):
                for way in ways:
                    yield suspect or 0, _change(c, way, axis=axis)
            if suspect is not None and not c.function.startswith(MODULE):
                yield from ((suspect, change) for change in self._of_two(rank, c))
                yield from ((suspect, change) for change in self._once(c))
                yield from ((suspect + 1, change) for change in self._of_numbers(rank, c))
        yield from self._of_wholes(rank, c)
        yield from self._of_the_first(rank, c)
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
            for axis in self._calls.unlike(c, at, gradients=True):
                yield suspect, _change(c, "sum_back", axis=axis, ats=(at,))
            if of_module or suspect == SUSPECT["untold"]:
                continue
            if self._is_one_of_several(rank, c, taken):
                yield suspect + 1, _change(c, "detach", ats=(at,))

    def _of_wholes(self, rank: int, c: Computation) -> Iterator[tuple[int, Change]]:
        """With all parts of what it takes. Of what is no number, as an order, no state is known."""
        values = self._lines.computed(rank).values
        states = [self._states.forward(rank, n) for n in c.gives
                  if values[n].is_floating_point()] or ["untold"]  # fmt: skip
        if c.function in PICKS or (c.function in PEAKS and len(c.gives) > 1):
            states.append("untold")
        suspects = [SUSPECT[state] for state in states if state in SUSPECT]
        if suspects:
            yield from ((min(suspects) + later, change) for later, change in self._wholes.at(c))

    def _of_the_first(self, rank: int, c: Computation) -> Iterator[tuple[int, Change]]:
        """With what the first rank gives, where no gradient passes: a draw, a mask, an order."""
        given = c.gives[0]
        state = SUSPECT.get(self._states.forward(rank, given))
        if len(c.gives) == 1 and state and given not in self._lines.computed(rank).with_graph:
            for axis in self._calls.unlike(c, -1):
                yield state + 1, _change(c, "first", axis=axis)

    def _of_two(self, rank: int, c: Computation) -> Iterator[Change]:
        """With both sums of a ratio."""
        if c.function not in ("div", "sub") or not all(isinstance(t, int) for t in c.takes):
            return
        mine = self._lines.computed(rank)
        shapes = {mine.values[t].shape for t in c.takes if isinstance(t, int)}
        for axis in self._axes if len(c.takes) == 2 and len(shapes) == 1 else ():
            if all(self._calls.alike(axis, c, at) is False for at in (0, 1)):
                for way in ("sum", "sum_both"):
                    yield _change(c, way, axis=axis, ats=(0, 1))

    def _once(self, c: Computation) -> Iterator[Change]:
        """With what all ranks add to what each has a part of as a share of it: a sum that follows
        counts it once for each."""
        pairs: Sequence[tuple[int, int]] = ()  # what is added, and to what
        if c.function in ("add", "sub") and len(c.takes) == 2:
            pairs = (0, 1), (1, 0)
        elif c.function in WITH_BIAS and len(c.takes) > 2:
            pairs = ((2, 0),)
        for at, to in pairs:
            if not isinstance(c.takes[at], int) or not isinstance(c.takes[to], int):
                continue
            for axis, groups in self._axes.items():
                size, *others = {len(g) for g in groups}
                alike = [self._calls.alike(axis, c, i) for i in (at, to)]
                if not others and alike == [True, False]:
                    yield _change(c, "once", axis=axis, ats=(at,), by=1 / size)

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
            for axis in self._calls.unlike(c, at):
                yield from ((suspect, _change(c, way, axis=axis, ats=(at,))) for way in ways)

    def _of_numbers(self, rank: int, c: Computation) -> Iterator[Change]:
        """With a number in it times the size of an axis, or by it, or that of all ranks; and left
        out, where that leaves the shape."""
        mine = self._lines.computed(rank)
        sizes = {len(g) for axis, groups in self._axes.items() if axis for g in groups}
        for at in OF_NUMBERS.get(c.function, ()):
            taken = c.takes[at] if at < len(c.takes) else 0
            for axis in self._calls.numbers_unlike(c, at):
                yield _change(c, "sum", axis=axis, ats=(at,))
                yield _change(c, "largest", axis=axis, ats=(at,))
            if is_number(taken):
                for size in sorted(sizes - {1}):
                    yield _change(c, "number", ats=(at,), by=1 / size)
                    yield _change(c, "number", ats=(at,), by=float(size))
        first = c.takes[0]
        if isinstance(first, int) and first in mine.with_graph and self._keeps_shapes(place_of(c)):
            yield _change(c, "skip")

    def _keeps_shapes(self, key: str) -> bool:
        """Whether each of its calls on every rank gives another tensor, of the shape of the first
        that it takes."""
        if key not in self._kept:
            self._kept[key] = all(
                _keeps_shape(c, self._lines.computed(rank))
                for rank in self._states.ranks
                for c in self._calls.of(rank, key)
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


def _of_peaks(c: Computation) -> Way | None:
    """Whether it takes the largest, or the smallest, as `x.scatter_reduce(0, i, y, "amax")`."""
    words = (c.function, *(t.rpartition("=")[2].strip("'") for t in c.takes if isinstance(t, str)))
    return next((PEAKS[word] for word in words if word in PEAKS), None)


def _in_turns(changes: Sequence[Change]) -> Iterator[Change]:
    """Of each kind some, then the next: a dozen sums of gradients say no more than four."""
    kinds: dict[str, list[Change]] = {}
    for change in changes:
        kinds.setdefault(KINDS.get(change.way, ""), []).append(change)
    while kinds:
        for kind, own in [*kinds.items()]:
            yield from own[:TURN]
            kinds[kind] = own[TURN:]
        kinds = {kind: own for kind, own in kinds.items() if own}


def _several_at_once(
    found: Mapping[Change, Soon], within: Mapping[Change, tuple[str, str]]
) -> dict[Change, Soon]:
    """What adds up, or looks at a whole, at several lines of one function: as the mean and the
    deviation, neither of which is enough. And modules of all layers, which a line calls in turn."""
    together: dict[tuple[object, ...], list[Change]] = {}
    for change in found:
        where, function = within[change]
        adds = change.way in ("sum", "sum_both") and not change.ats and function in ADDING_UP
        alike = change.way, change.axis, change.ats, change.dim
        if function.startswith(MODULE):
            together.setdefault((re.sub(r"\d+", "*", function), *alike), []).append(change)
        elif where and (adds or change.way in BOTH):
            together.setdefault((where, *alike), []).append(change)
    out = {}
    for changes in together.values():
        most = MOST_LAYERS if within[changes[0]][1].startswith(MODULE) else MOST_AT_ONCE
        if 1 < len(changes) <= most:
            first, *others = sorted(changes, key=lambda change: found[change])
            also = tuple((one.site, one.function) for one in others)
            late, unsaid, suspect, there, place = found[first]
            change = replace(first, also=also)
            later = SEVERAL_LATER if change.several else 0
            out[change] = late, unsaid, suspect + later, there, place - 1
    return out


def _keeps_shape(c: Computation, mine: Computed) -> bool:
    first, given = c.takes[0], next(iter(c.gives), None)
    if not isinstance(first, int) or given is None or given == first or c.function in OF_PRODUCTS:
        return False
    one, other = mine.values[first], mine.values[given]
    return one.shape == other.shape and one.dtype == other.dtype


def _change(
    c: Computation, way: Way, *, axis: str = "", ats: tuple[int, ...] = (), by: float = 1.0
) -> Change:
    return Change(site=c.site, function=c.function, way=way, axis=axis, ats=ats, by=by)


def _sums(change: Change, axes: Set[str]) -> bool:
    return change.axis in axes and change.way in (
        "sum",
        "sum_both",
        "sum_back",
        "largest",
        "smallest",
        "first",
        *BOTH,
    )
