"""What is set on a module of a rank otherwise than on that of the single process."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.record.trace import Trace, Traces

Values = tuple[str, ...]
MOST_VALUES = 12  # of an attribute that are kept
MOST_DIGITS = 4  # behind the point, of what is set by hand
CONSTANT = r"-?\d+\.\d+(e-?\d+)?|-?inf|\([-\d., ]+\)"
OF_A_RANK = ("rank", "world", "stage")  # in names of what differs by right


@dataclass(frozen=True, slots=True, kw_only=True)
class SetOtherwise:
    """An attribute of modules that has the values `now` on ranks, and `was` in the single process:
    those that it had when the module was called, in order."""

    attribute: str
    now: Values
    was: Values
    modules: tuple[str, ...]
    ranks: tuple[int, ...]

    @property
    def is_switched(self) -> bool:
        """Whether it is on or off, stays so in the single process, and not on these ranks."""
        return _is_switched(self.now, self.was)

    @property
    def is_the_opposite(self) -> bool:
        """Whether it is on all the time where it is off in the single process, or off for on."""
        return len(self.now) == len(self.was) == 1 and {*self.now, *self.was} == {"True", "False"}

    @property
    def is_another_constant(self) -> bool:
        """Whether it is one number with digits behind its point, or an infinite one, or a tuple,
        all the time, and another of that length there: no count, and no share of a rank's."""
        if len(self.now) != 1 or len(self.was) != 1:
            return False
        return all(re.fullmatch(CONSTANT, v) for v in (*self.now, *self.was)) and (
            self.now[0].count(",") == self.was[0].count(",")
        )

    @property
    def is_another_word(self) -> bool:
        """Whether it is one word all the time, and another there."""
        return len(self.now) == len(self.was) == 1 and all(
            value.startswith("'") for value in (*self.now, *self.was)
        )

    @property
    def is_a_choice(self) -> bool:
        """Whether it is a switch or a word, and no number."""
        return _is_a_choice(*self.now, *self.was)


def set_otherwise(
    traces: Traces, near: Mapping[str, int], sizes: Iterable[int] = ()
) -> list[SetOtherwise]:
    """Of the modules in `near`, the nearest first: module -> how near, of which 0 is accused.

    Only where no value is one of the single process's, or where something is switched on or off;
    of the accused also where a number with digits behind its point is none, as of a scale that is
    set from call to call. Of other modules than the accused what differs from call to call or from
    rank to rank is left out, as what counts or measures. sizes: of axes; a count that is the single
    process's divided by one is a part of it, and left out.
    """
    sizes = {*sizes}
    found: dict[tuple[str, Values, Values], dict[str, dict[int, None]]] = {}
    for module in sorted(near, key=near.__getitem__):
        there = traces.single.settings.get(module, {})
        here = {rank: t.settings.get(module, {}) for rank, t in traces.ranks.items()}
        for attribute, was in there.items():
            now = {rank: own[attribute] for rank, own in here.items() if attribute in own}
            odd = {rank: own for rank, own in now.items() if not {*own} & {*was}
                   or (not near[module] and _is_a_measure_beyond(own, was))
                   or _is_switched(own, was)}  # fmt: skip
            even = len({*odd.values()}) == 1 and all(
                len(own) == 1 or _is_switched(own, was) for own in odd.values()
            )
            if not odd or (near[module] and not even) or _by_right(attribute, odd, was, sizes):
                continue
            for rank, own in odd.items():
                held = found.setdefault((attribute, own, was), {})
                held.setdefault(module, {})[rank] = None
    return [
        SetOtherwise(
            attribute=attribute,
            now=now,
            was=was,
            modules=tuple(held),
            ranks=tuple(sorted({rank for ranks in held.values() for rank in ranks})),
        )
        for (attribute, now, was), held in found.items()
    ]


def _is_a_measure_beyond(own: Values, was: Values) -> bool:
    """Whether some of these values, numbers that count nothing and that somebody may have set, as
    a meter's with all its digits are not, are none of those, which are all that there were."""
    new = [re.findall(r"\d+\.(\d+)", value) for value in {*own} - {*was}]
    return len(was) < MOST_VALUES and any(
        digits and all(len(d) <= MOST_DIGITS for d in digits) for digits in new
    )


def _is_switched(own: Values, was: Values) -> bool:
    return len(was) == 1 < len(own) and {*own} | {*was} == {"True", "False"}


def _by_right(attribute: str, odd: Mapping[int, Values], was: Values, sizes: set[int]) -> bool:
    """Whether it is what a rank is, how many there are, or its share of a count."""
    if any(word in attribute.lower() for word in OF_A_RANK):
        return True
    values = {value for own in odd.values() for value in own}
    if len(was) != 1 or not was[0].isdigit() or not all(value.isdigit() for value in values):
        return False
    whole, parts = int(was[0]), {int(value) for value in values}
    return all(
        any(part * size == whole or (whole == 1 and part == size) for size in sizes if size > 1)
        for part in parts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedOtherwise:
    """An attribute of a module that has the value `now` in a call on a rank, and `was` in every
    call of the single process that gets the same; `more`: how many more such calls there are. left:
    the call before it has that value, too, and is computed again in the backward."""

    attribute: str
    module: str
    rank: int
    call: int
    now: str
    was: str
    more: int
    left: bool


def turned_otherwise(
    traces: Traces, module: str, into: Sequence[Seen], wrong: Collection[tuple[int, int]]
) -> list[TurnedOtherwise]:
    """Choices that are another in a call than in the single process's for the same: switches and
    words, no numbers, which count. into: what goes into the module; wrong: ranks and their calls
    that are looked at."""
    found: dict[str, dict[tuple[int, int], TurnedOtherwise]] = {}
    for s in into:
        if s.forward != "right" or s.where is None or (s.rank, s.call.number) not in wrong:
            continue
        there = _calls_that_get(traces.single, s)
        mine = traces.ranks[s.rank]
        turned = {
            n for t in (mine, traces.single) for call in t.turned.get(module, ()) for n in call
        }
        for attribute, now in _set_in(mine, module, s.call.number).items():
            if attribute not in turned:
                continue
            was = {_set_in(traces.single, module, call).get(attribute, "") for call in there}
            if was and now not in was and len(was) == 1 and _is_a_choice(now, *was):
                left = _is_left(mine, s, module, attribute, now)
                one = TurnedOtherwise(
                    attribute=attribute,
                    module=module,
                    rank=s.rank,
                    call=s.call.number,
                    now=now,
                    was=was.pop(),
                    more=0,
                    left=left,
                )
                found.setdefault(attribute, {}).setdefault((s.rank, s.call.number), one)
    every = [[*ones.values()] for ones in found.values()]
    return [replace(ones[0], more=len(ones) - 1) for ones in every]


def _calls_that_get(single: Trace, s: Seen) -> set[int]:
    """The calls of the single process in which all of these vectors go in."""
    assert s.where is not None
    start, out = 0, set()
    for call, tensor in zip(single.calls, single.outputs, strict=True):
        if (call.module, call.part) != (s.call.module, s.call.part) or call.recomputed:
            continue
        num = len(vectors(tensor))
        its = s.where.found[:, start : start + num].any(1) | s.where.empty
        start += num
        if its.shape[0] and bool(its.all()):
            out.add(call.number)
    return out


def _set_in(trace: Trace, module: str, call: int) -> Mapping[str, str]:
    """What is set on a module in a call."""
    fixed = {n: v[0] for n, v in trace.settings.get(module, {}).items() if len(v) == 1}
    calls = trace.turned.get(module, ())
    return {**fixed, **calls[call]} if call < len(calls) else fixed


def _is_left(trace: Trace, s: Seen, module: str, attribute: str, now: str) -> bool:
    before = s.call.number - 1
    again = {c.number for c in trace.calls if c.module == s.call.module and c.recomputed}
    return before in again and _set_in(trace, module, before).get(attribute) == now


def _is_a_choice(*values: str) -> bool:
    return all(v in ("True", "False", "None") or v.startswith(("'", "torch.")) for v in values)
