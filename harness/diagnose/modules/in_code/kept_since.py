"""What a line computes with and had in an earlier call of the model, as a list or a state kept.

A tensor that is there still has the number of its value, so what was kept is told from what was
made anew. Not what the single process keeps there, too, nor what it has the same in all its calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sumgrad.record.computed import Computation, Computed, same_value
from sumgrad.record.line import Line
from sumgrad.record.trace import INTO, Trace
from torch import Tensor

MOST_FOLLOWED = 200  # computations of one call, back from the line


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSince:
    """taken: the line that takes it, in `call` of the model; made: that which made it, in the
    earlier call `then`. taken_then: it was taken there in that call, and may be older."""

    taken: Line
    made: Line
    call: int
    then: int
    taken_then: bool


def kept_since(mine: Trace, single: Trace, place: int) -> KeptSince | None:
    """Of what computation number `place` is made of, the nearest that is kept; None where nothing
    is, or where it is not known when the model was called."""
    own, there = _Run(mine), _Run(single)
    call = own.calls[place]
    if not call:
        return None
    for at in own.back(place):
        c = own.computed.computations[at]
        for argument, number in enumerate(c.takes):
            if not isinstance(number, int) or own.computed.values[number].numel() < 2:
                continue
            since = own.since(at, argument)
            if since is None or not there.has_another(c, argument, own.computed.values[number]):
                continue
            return KeptSince(
                taken=(c.line, c.code),
                made=c.made_at[argument],
                call=call,
                then=since[0],
                taken_then=since[1],
            )
    return None


def _ends(trace: Trace) -> list[int]:
    """Where calls of the model end, or of its one part that a rank calls, as of a pipeline."""
    called = dict.fromkeys(c.module for c in trace.calls if not c.module.startswith(INTO))
    outer = [n for n in called if not any(_is_inside(n, other) for other in called)]
    if len(outer) != 1:
        return []
    return [i for i, c in enumerate(trace.calls)
            if c.module == outer[0] and c.part == 0 and not c.recomputed]  # fmt: skip


def _is_inside(module: str, other: str) -> bool:
    return module != other and (not other or module.startswith(f"{other}."))


class _Run:
    """calls: of each computation, how many calls of the model had ended. makers: by number of a
    value, the place of what gave it first; what hands it on gives it, too."""

    def __init__(self, trace: Trace) -> None:
        self.computed: Computed = trace.computed
        ends = _ends(trace)
        self.calls = [sum(end < c.calls for end in ends) for c in self.computed.computations]
        self.makers: dict[int, int] = {}
        self._at_site: dict[tuple[str, str], list[int]] = {}
        for i, c in enumerate(self.computed.computations):
            self._at_site.setdefault((c.site, c.function), []).append(i)
            for n in c.gives:
                self.makers.setdefault(n, i)

    def back(self, place: int) -> Iterator[int]:
        """The places of what leads there in the same call of the model, the nearest first."""
        todo, seen = deque([place]), {place}
        while todo and len(seen) <= MOST_FOLLOWED:
            at = todo.popleft()
            yield at
            for number in self.computed.computations[at].takes:
                maker = self.makers.get(number) if isinstance(number, int) else None
                if maker is None or maker in seen or self.calls[maker] != self.calls[place]:
                    continue
                seen.add(maker)
                todo.append(maker)

    def since(self, at: int, argument: int) -> tuple[int, bool] | None:
        """In which earlier call of the model what stands there was made, or else was taken there
        already, and which of the two it is."""
        c, number = self.computed.computations[at], self.computed.computations[at].takes[argument]
        maker = self.makers.get(number) if isinstance(number, int) else None
        if maker is not None:
            then, inside = self.calls[maker], self.computed.computations[maker].inside
            # What a call has just given, or was made for it.
            handed_on = not c.inside and self.calls[at] == then + 1
            if then >= self.calls[at] or handed_on:
                return None
            if then or inside:
                return then, False
        # What no line made is a parameter or the batch.
        for i in self._of_its_site(c) if c.made_at[argument][0] else ():
            taken = self.computed.computations[i].takes
            if self.calls[i] < self.calls[at] and taken[argument : argument + 1] == (number,):
                return self.calls[i], True
        return None

    def has_another(self, c: Computation, argument: int, value: Tensor) -> bool:
        """Whether the runs of that line here take several others there, or none that is the same,
        and keep none of them."""
        places = [i for i in self._of_its_site(c)
                  if len(self.computed.computations[i].takes) == len(c.takes)]  # fmt: skip
        numbers = [self.computed.computations[i].takes[argument] for i in places]
        held = [self.computed.values[n] for n in numbers if isinstance(n, int)]
        kept = any(self.since(i, argument) is not None for i in places)
        return bool(held) and not kept and not all(same_value(h, value) for h in held)

    def _of_its_site(self, c: Computation) -> Sequence[int]:
        return self._at_site.get((c.site, c.function), ())
