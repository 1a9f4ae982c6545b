"""What is set on modules near what is wrong otherwise than in the single process, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from sumgrad.base.files import is_librarys
from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.forwards.entering import what_goes_into
from sumgrad.diagnose.explainers.by_modules.leading import PLACES, led_by
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    gone_into,
    looked,
    owners,
    traces_looked_at,
)
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.weights.settings import (
    SetOtherwise,
    TurnedOtherwise,
    set_otherwise,
    turned_otherwise,
)
from sumgrad.diagnose.modules.where.first_wrong import (
    FirstWrong,
    first_wrong_backward,
    first_wrong_forward,
)
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.judge.joint import sizes_of
from sumgrad.record.trace import Traces

MOST_SHOWN = 3
MOST_VALUES = 6  # that are written out
# In names of what is on by right where there are ranks, and whole parts of such names.
OF_RANKS = ("parallel", "shard", "distribut", "sync", "local", "is_first", "is_last")
PARTS_OF_RANKS = {"dp", "tp", "pp", "cp", "ep", "sp", "ring", "ulysses", "split", "group", "rank",
                  "stage", "recompute", "checkpoint", "impl", "implementation",
                  "backend"}  # fmt: skip


def with_settings(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause, and what the first wrong module, those around it or those that own what is wrong
    have set that the single process has not; last what says by its name that there are ranks. Where
    the cause says no more than a place, a switch that is turned the other way all the time, or
    another constant, is told first."""
    look = looked(case)
    if case.traces is None or look is None:
        return diagnosis
    first, accused, found = _settings(case, look)
    leading = _leading(look, found, accused, diagnosis.ranks)
    first_ones = leading + [
        one
        for one in found
        if one not in leading
        and not _is_of_ranks(one.attribute.lower())
        and (
            (one.is_switched and one.ranks == diagnosis.ranks)
            or (one.is_a_choice and not {*one.modules}.isdisjoint(accused))
        )
    ]
    others = sorted((o for o in found if o not in first_ones), key=lambda o: not o.is_a_choice)
    front, behind = (tuple(map(_in_words, some[:MOST_SHOWN])) for some in (first_ones, others))
    turned = [] if first is None else _turned(case, first)
    said = replace(diagnosis, because=(*turned, *front, *diagnosis.because, *behind))
    if leading and not turned and diagnosis.kind in PLACES:
        return led_by(replace(said, because=said.because[1:]), front[0])
    return said


def is_set_otherwise(case: Case, found: FirstWrong) -> bool:
    """Whether something of the user's own modules is set otherwise on the ranks that leads a report
    of where it goes wrong."""
    look = looked(case)
    if case.traces is None or look is None:
        return False
    _, accused, every = _settings(case, look)
    return bool(_leading(look, every, accused, found.ranks))


def _settings(
    case: Case, look: Look
) -> tuple[FirstWrong | None, set[str | None], list[SetOtherwise]]:
    """The first wrong module, those that are accused, and what is set otherwise near them."""
    assert case.traces is not None
    forward = first_wrong_forward(look)
    first = forward or first_wrong_backward(look, owners(case))
    accused = [first.wrong] if first is not None else owners(case)
    within = None  # the module in whose forward it lies
    if first is not None and first.wrong and _is_around_it(case, first, back=forward is None):
        within = first.wrong.rpartition(".")[0]
    accused += [within] if within and forward is not None else []
    around = [m for m in case.traces.single.settings if any(is_in(a, m) for a in accused)]
    around.sort(key=lambda m: -m.count(".") - bool(m))
    near: dict[str, int] = {}
    for distance, modules in enumerate((accused, owners(case), around)):
        for module in modules:
            near.setdefault(module, distance)
    found = set_otherwise(case.traces, near, sizes_of(case.record).values())
    return first, {*accused, within}, found


def _leading(
    look: Look, found: Sequence[SetOtherwise], accused: set[str | None], ranks: Sequence[int]
) -> list[SetOtherwise]:
    """Of what is set otherwise on all of these ranks the switches of the user's own that are the
    other way, and other words or constants of what is accused; but for what says by its name that
    there are ranks."""
    return [
        one
        for one in found
        if {*one.ranks} >= {*ranks}
        and not _is_of_ranks(one.attribute.lower())
        and _is_users(look, one)
        and (
            one.is_the_opposite
            or ((one.is_another_constant or one.is_another_word) and {*one.modules} & accused)
        )
    ]


def _is_of_ranks(attribute: str) -> bool:
    """Whether its name says that there are ranks, or how what is the same is computed."""
    return any(word in attribute for word in OF_RANKS) or not PARTS_OF_RANKS.isdisjoint(
        re.split(r"[._]", attribute)
    )


def _is_users(look: Look, one: SetOtherwise) -> bool:
    """Whether a class of the user's own has it set: a library's may be on by design."""
    sources = [look.sources.get(module, "").partition(" at ") for module in one.modules]
    return any(at and not is_librarys(line) for _, at, line in sources)


def _is_around_it(case: Case, first: FirstWrong, *, back: bool) -> bool:
    """Whether what is wrong first lies in the forward around a module: before it, or between it and
    the loss."""
    return not first.modules if back else what_goes_into(case, first) == "wrong"


@as_a_hint
def _turned(case: Case, first: FirstWrong) -> list[str]:
    """What is set otherwise in the first wrong calls than in the single process's for the same: on
    the module, or on one that it is in."""
    traces = traces_looked_at(case)
    if traces is None:
        return []
    inside = {
        module: {
            (s.rank, number) for s in first.seen for number in _calls_around(traces, s, module)
        }
        for module in traces.single.settings
        if module == first.wrong or is_in(first.wrong, module)
    }
    told = [
        one
        for module, calls in sorted(inside.items(), key=lambda pair: -len(pair[0]))
        for one in turned_otherwise(traces, module, gone_into(case, module), calls)
    ]
    return [_turned_in_words(one) for one in told[:MOST_SHOWN]]


def _turned_in_words(one: TurnedOtherwise) -> str:
    more = f" (and so in {one.more} more calls of all ranks)" if one.more else ""
    before = ("; so has the call before it, which is computed again in the backward and may have "
              "left it so" if one.left else "")  # fmt: skip
    return (
        f"{one.module or 'the model itself'} has {one.attribute} = {one.now} in call {one.call} on "
        f"rank {one.rank}{more}, and {one.was} in the single process's call that gets the "
        f"same{before}"
    )


def _calls_around(traces: Traces, s: Seen, module: str) -> set[int]:
    """The number of the call of a module that a rank's call is, or is inside of."""
    if module == s.call.module:
        return {s.call.number}
    calls = traces.ranks[s.rank].calls
    after = calls[calls.index(s.call) :]
    ended = (c for c in after if (c.module, c.recomputed) == (module, s.call.recomputed))
    return {c.number for c in (next(ended, None),) if c is not None}


def _in_words(one: SetOtherwise) -> str:
    modules = some_of([m or "the model itself" for m in one.modules])
    has = "has" if len(one.modules) == 1 else "have"
    return (
        f"{modules} {has} {one.attribute} = {_values(one.now)} on rank {spans(one.ranks)}, and "
        f"{_values(one.was)} in the single process"
    )


def _values(values: tuple[str, ...]) -> str:
    more = ", ..." if len(values) > MOST_VALUES else ""
    return ", then ".join(values[:MOST_VALUES]) + more
