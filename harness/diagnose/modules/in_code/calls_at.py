"""Which calls a place in the code makes on each rank, and whether ranks have the same there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.diagnose.modules.values.value_states import gradient_of
from sumgrad.record.computed import MODULE, Computation
from torch import Tensor

Axes = Mapping[str, Sequence[Sequence[int]]]


def place_of(c: Computation) -> str:
    """Which call in the code it is, or of which module; empty of what is neither."""
    return c.site or (c.function if c.function.startswith(MODULE) else "")


def is_number(words: int | str) -> bool:
    """Of a Computation's argument, whether it is one, and no tensor."""
    if isinstance(words, int):
        return False
    try:
        float(words.rpartition("=")[2])
    except ValueError:
        return False
    return True


class CallsAt:
    """axes: name of one, or "" for all of them together, -> its groups of ranks."""

    def __init__(self, lines: Lines, axes: Axes) -> None:
        self._lines, self._axes = lines, axes
        self._known: dict[tuple[str, str, int, bool], bool | None] = {}
        self._calls: dict[tuple[int, str], list[Computation]] = {}
        for rank in lines.states.ranks:
            for c in lines.computed(rank).computations:
                self._calls.setdefault((rank, place_of(c)), []).append(c)

    def of(self, rank: int, place: str) -> Sequence[Computation]:
        """In order."""
        return self._calls.get((rank, place), ())

    def unlike(self, c: Computation, at: int, *, gradients: bool = False) -> Iterator[str]:
        """Axes over whose ranks what it gives, or argument `at`, or the gradient of that, can be
        summed, and is not alike: else a sum is a factor."""
        yield from (axis for axis in self._axes if self.alike(axis, c, at, gradients) is False)

    def alike(self, axis: str, c: Computation, at: int, gradients: bool = False) -> bool | None:
        """Whether the ranks of each group have the same there in all its calls; None where they
        have other shapes, or call it more or less often: then some wait for what never comes."""
        key = axis, place_of(c), at, gradients
        if key not in self._known:
            self._known[key] = self._are_alike(*key)
        return self._known[key]

    def dims(self, axis: str, c: Computation, at: int) -> Sequence[int]:
        """Dimensions along which what the ranks of each group have there can be put together, and
        is not alike; none where they call it more or less often."""
        dims: set[int] | None = None
        alike = True
        for own in self._together(axis, place_of(c), at):
            if own is None:
                return ()
            shapes = [t.shape for t in own]
            if len({len(shape) for shape in shapes}) > 1:
                return ()
            unlike = {d for d, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1}
            here = unlike if unlike else {*range(own[0].ndim)}
            dims = here if dims is None else dims & here
            if len(unlike) > 1 or not dims:
                return ()
            alike = alike and not unlike and all(torch.equal(own[0], t) for t in own)
        return () if alike or dims is None else sorted(dims)

    def whole_shapes(self, axis: str, c: Computation, at: int, dim: int) -> set[tuple[int, ...]]:
        """Of what the ranks of each group have together along a dimension, in all its calls."""
        shapes = set[tuple[int, ...]]()
        for own in self._together(axis, place_of(c), at):
            for first, *others in () if own is None else (own,):
                size = sum(t.shape[dim] for t in (first, *others))
                shapes.add((*first.shape[:dim], size, *first.shape[dim + 1 :]))
        return shapes

    def numbers_unlike(self, c: Computation, at: int) -> Iterator[str]:
        """Axes over whose ranks argument `at`, a number that is no tensor, is not alike."""
        for axis, groups in self._axes.items():
            said = [[[one.takes[at : at + 1] for one in self.of(rank, place_of(c))]
                     for rank in group] for group in groups]  # fmt: skip
            each = [own for group in said for calls in group for own in calls]
            as_often = all(len({len(calls) for calls in group}) == 1 for group in said)
            known = bool(each) and all(len(own) == 1 and is_number(own[0]) for own in each)
            unlike = any(calls != group[0] for group in said for calls in group)
            if as_often and known and unlike:
                yield axis

    def _are_alike(self, axis: str, place: str, at: int, gradients: bool) -> bool | None:
        alike = True
        for own in self._together(axis, place, at, gradients):
            if own is None or len({t.shape for t in own}) > 1:
                return None
            alike = alike and all(torch.equal(own[0], t) for t in own)
        return alike

    def _together(
        self, axis: str, place: str, at: int, gradients: bool = False
    ) -> Iterator[Sequence[Tensor] | None]:
        """What the ranks of a group have there, call by call; None where a rank has nothing, or
        calls it more or less often, or is alone."""
        for group in self._axes[axis]:
            held = [[*self._held(rank, place, at, gradients)] for rank in group]
            if len(held) < 2 or len({len(own) for own in held}) > 1 or not held[0]:
                yield None
                return
            for own in zip(*held, strict=True):
                known = [t for t in own if t is not None]
                yield known if len(known) == len(own) else None

    def _held(self, rank: int, place: str, at: int, gradients: bool) -> Iterator[Tensor | None]:
        mine = self._lines.computed(rank)
        for c in self.of(rank, place):
            number = c.takes[at] if 0 <= at < len(c.takes) else next(iter(c.gives), "")
            if not isinstance(number, int):
                yield None
            else:
                yield gradient_of(mine, number) if gradients else mine.values[number]
