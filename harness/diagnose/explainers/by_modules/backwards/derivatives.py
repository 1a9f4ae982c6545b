"""A user's Function that gives something else than the derivative of its forward, in words.

Either by finite differences of its forward, or, where it only moves numbers, by where they went.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import first_lines, known_lines
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    line_from_here,
    looked,
    ordinal,
    owners,
)
from sumgrad.diagnose.modules.autograd.derivatives import (
    NEAR,
    OwnFormula,
    no_derivatives,
    own_formulas,
)
from sumgrad.diagnose.modules.autograd.gives_nothing import give_nothing, may_give_nothing
from sumgrad.diagnose.modules.autograd.moved import Brought, Element, Mover, movers
from sumgrad.diagnose.modules.in_code.calls_in_source import called_from
from sumgrad.diagnose.modules.values.matching import vectors
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward
from sumgrad.record.derivative import Derivative, Off
from sumgrad.record.trace import Traces
from sumgrad.record.ways import Passed

OTHERS = ("forward", "recomputed", "rows_read", "loss_rows")  # causes that no formula explains
AT_THE_LOSS = ("loss_weights", "loss_at_tokens", "row_factors")  # that say how rows are weighed
MOST_PARTS, DIGITS = 64, 1e-6  # of a fraction that a factor is taken for
WHERE = ("backward", "own_backward")  # that say no more than where
SAID = "not the derivative of its forward"
IN_ANOTHER_ORDER = "in another order"
OTHER_WAY = "does not take gradients back the way that its forward takes numbers"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongFunctions:
    """said: which, and that they are wrong, empty where it may be meant so; because: how."""

    said: str
    because: tuple[str, ...]


def wrong_functions(
    case: Case, passed: Sequence[Passed], ratio: float | None, *, of_parameters: bool = False
) -> WrongFunctions | None:
    """Of Functions on the way those that explain what is wrong there. ratio: it is off by that
    factor alone; one that only scales explains nothing else, and may be meant. of_parameters: what
    is wrong is what a parameter is given, and no tensor on its way through."""
    traces = case.traces
    if traces is None:
        return None
    formulas = _not_the_derivative(case)
    keys = [*dict.fromkeys((p.function, p.written) for p in passed if p.own)]
    moving = wrong_movers(case)
    # Of what only moves numbers it is known where they went, which says more.
    known = {
        key for key in keys if key in moving and (moving[key].crossed or _is_sure(moving[key]))
    }
    found = [formulas[key] for key in keys if key in formulas and key not in known]
    found = [one for one in found if of_parameters or any(not d.leaf for _, d in one.wrong)]
    scaling = [
        one
        for one in found
        if one.only_scales
        and any(d.together and d.off and d.off.factors[0] > 0 for _, d in one.wrong)
    ]
    found = [one for one in found if _explains(one.only_scales, one.scale, ratio)]
    if found:
        return WrongFunctions(
            said=f"the backward of {functions_in_words(found)} is {SAID}",
            because=(*how_they_are_off(found), *what_they_call(found), *_nor_there(traces, found)),
        )
    if nothing := [] if ratio is not None else _gives_nothing(case, keys):
        return nothing[0]
    wrong = [moving[key] for key in keys if key in moving]
    wrong = [one for one in wrong if _explains(_only_scales(one), _scale(one), ratio)]
    if crossed := [one for one in wrong if one.crossed]:
        return _in_another_order(crossed[0])
    sure = [one for one in wrong if _is_sure(one)]
    if sure:
        return WrongFunctions(
            said=f"the backward of {functions_in_words(sure)} {OTHER_WAY}",
            because=(*how_they_bring_back(sure), *what_they_call(sure)),
        )
    told = [one for one in wrong if any(w.lacks for w in one.wrong)]
    because = (*how_they_bring_back(told), *(how_they_are_off(scaling) if ratio is None else ()))
    return WrongFunctions(said="", because=because) if because else None


def _nor_there(traces: Traces, found: Sequence[OwnFormula]) -> list[str]:
    """Of the single process the Functions of which the same is so, as of a surrogate."""
    own = {one.function for one in found}
    others = dict.fromkeys(d.function for d in traces.single.computed.derivatives if not d.agrees)
    names = [name for name in others if name not in own]
    if not names:
        return []
    return [f"that of {some_of(names)}, which the single process runs, is none either: where that "
            f"is meant, as a surrogate's slope is, look at what the two do otherwise"]  # fmt: skip


def _not_the_derivative(case: Case) -> dict[tuple[str, str], OwnFormula]:
    """Without arguments that get what they get in the single process: what all of this is worth."""
    out = {}
    for key, one in (no_derivatives(case.traces) if case.traces is not None else {}).items():
        told = tuple(
            own for own in one.told if own[1].agrees or not _gets_what_is_right(case, *own)
        )
        if any(not d.agrees for _, d in told):
            out[key] = replace(one, told=told)
    return out


def _gets_what_is_right(case: Case, rank: int, d: Derivative) -> bool:
    """Where each of its vectors stands at one place of the single process's alone: of those that
    are repeated, as of an expanded tensor, any gradient would do."""
    lines = known_lines(case) if d.place >= 0 <= d.at and not (d.off and d.off.factors) else None
    if lines is None:
        return False
    takes = lines.computed(rank).computations[d.place].takes
    number = takes[d.at] if d.at < len(takes) else ""
    if not isinstance(number, int) or lines.states.backward(rank, number) != "right":
        return False
    own, beside = vectors(lines.computed(rank).values[number]), lines.states.beside(rank, number)
    return beside is not None and len(own.unique(dim=0)) == len(own) == len(beside[0])


def _gives_nothing(case: Case, keys: Sequence[tuple[str, str]]) -> list[WrongFunctions]:
    """Those on the way that hand a tensor nothing."""
    ranks = case.traces.ranks.values() if case.traces is not None else ()
    if not any({*keys} & may_give_nothing(trace.computed) for trace in ranks):
        return []
    lines = known_lines(case)
    odd = {} if lines is None else give_nothing(lines)
    out = []
    for one in (odd[key] for key in keys if key in odd):
        call, made = one.call, one.call.made_at[one.at]
        at = f", made at {line_and_code(*made)}," if made[0] else ""
        out.append(
            WrongFunctions(
                said=f"the backward of {call.function} (at {line_from_here(call.written)}) gives "
                f"its {ordinal(one.at)} tensor{at} no gradient on rank {spans(one.ranks)}",
                because=(
                    f"autograd asks it for one; it is called at "
                    f"{line_and_code(call.line, call.code)}",
                ),
            )
        )
    return out


def _only_scales(one: Mover) -> bool:
    return all(w.times is not None for w in one.wrong)


def _scale(one: Mover) -> float | None:
    """The one number that it scales all by."""
    times = [w.times for w in one.wrong if w.times is not None]
    alike = times and all(abs(t - times[0]) <= NEAR * abs(times[0]) for t in times)
    return times[0] if alike else None


def _is_sure(one: Mover) -> bool:
    """Whether some of it can be nothing that is meant: only what is understood."""
    return any(
        (w.times is not None or w.lacks or w.foreign) and not _may_be_meant(w) for w in one.wrong
    )


def _in_another_order(one: Mover) -> WrongFunctions:
    assert one.crossed is not None
    first, second = one.crossed
    lines = some_of([line_and_code(*line) for line in one.lines])
    return WrongFunctions(
        said=f"the ranks call {one.function} {IN_ANOTHER_ORDER}: what rank {first.rank} hands it "
        f"in call {first.call} rank {second.rank} hands it in call {second.call}",
        because=(
            f"a collective in it brings together what does not belong together; it is called at "
            f"{lines}",
        ),
    )


def _may_be_meant(w: Brought) -> bool:
    """Of copies in replicas that a step counts as one; and the sum over ranks of what each has at
    the same place, as where what they take is one thing and a part of each rank's own."""
    if w.foreign is None:
        return w.replicas and bool(w.lacks)
    alike = w.owner is not None and w.foreign.index == w.owner.index == w.element.index
    return alike and not w.lacks and {e.rank for e in w.copies} == {w.element.rank}


def moved(case: Case) -> dict[tuple[str, str], Mover]:
    """Functions that only move numbers, and how their backwards bring gradients back."""
    if "movers" not in case.known:
        traces = case.traces
        case.known["movers"] = movers(traces.ranks) if traces is not None else {}
    found: dict[tuple[str, str], Mover] = case.known["movers"]
    return found


def wrong_movers(case: Case) -> dict[tuple[str, str], Mover]:
    """Those that bring other gradients back, and do not so in the single process."""
    traces = case.traces
    wrong = {key: one for key, one in moved(case).items() if one.off}
    if not wrong or traces is None:
        return {}
    single = movers({0: traces.single}, alone=True)
    return {key: one for key, one in wrong.items() if key not in single or not single[key].off}


def are_the_derivative(case: Case) -> set[tuple[str, str]]:
    """Functions of which all that was told on the ranks is right."""
    traces = case.traces
    ranks = own_formulas(traces.ranks, traces.adjoints) if traces is not None else {}
    right = {key for key, one in ranks.items() if not one.wrong}
    return right | {key for key, one in moved(case).items() if one.is_right}


def _explains(only_scales: bool, scale: float | None, ratio: float | None) -> bool:
    if only_scales and scale is not None and ratio is not None:
        return abs(scale - ratio) <= 10 * NEAR * abs(ratio)
    return not only_scales and ratio is None


def functions_in_words(found: Sequence[OwnFormula | Mover]) -> str:
    return some_of([f"{one.function} (backward at {line_from_here(one.written)})" for one in found])


def what_they_call(found: Sequence[OwnFormula | Mover]) -> list[str]:
    """Of the first its backward's own functions: what is wrong may be in these."""
    called = called_from(found[0].written) if found else []
    if not called:
        return []
    shown = [f"{one.name} at {line_from_here(one.line)}" + (
        f", which does not read {some_of(one.unread)}" if one.unread else "")
        for one in called]  # fmt: skip
    return [f"the backward of {found[0].function} calls {some_of(shown)}"]


def how_they_bring_back(found: Sequence[Mover]) -> Iterator[str]:
    """What becomes of the gradients of what each has moved."""
    for one in found:
        lines = some_of([line_and_code(*line) for line in one.lines])
        yield (f"the forward of {one.function} only moves numbers, and {one.off} of "
               f"{one.told} that it takes, and that no other number equals, do not get back the "
               f"sum of what their copies were given; it is called at {lines}")  # fmt: skip
        told = [w for w in one.wrong if w.foreign or w.lacks or w.times is not None]
        told.sort(key=_may_be_meant)
        yield from _brought_in_words(one, told[0]) if told else ()


def _brought_in_words(one: Mover, w: Brought) -> Iterator[str]:
    e = w.element
    text = f"for one, number {_at(e.index)} that {one.function} takes on rank {e.rank} in its call "
    text += f"{e.call} goes to {_places(w.copies) or 'no place'}, and gets "
    if w.times is not None:
        yield f"{text}{_short(w.times)} times what is given there"
        return
    if w.foreign is None:
        text += f"nothing of what is given at {_places(w.lacks)}"
        text += ", which is right where all these ranks compute the same" if w.replicas else ""
        yield text
        return
    own = f"in place of what is given at {_places(w.lacks)} " if w.lacks else ""
    own = own or ("besides that " if w.copies else "")
    text += f"{own}what is given at {_places([w.foreign])}"
    if w.owner is not None:
        text += f", where number {_at(w.owner.index)} of rank {w.owner.rank} went"
    yield text


def _places(places: Sequence[Element]) -> str:
    return some_of([f"{_at(e.index)} of the result on rank {e.rank}" for e in places])


def _at(index: Sequence[int]) -> str:
    return f"({', '.join(map(str, index))})"


def how_they_are_off(found: Sequence[OwnFormula]) -> Iterator[str]:
    """What each gives beside finite differences of its forward."""
    for one in found:
        right = {d.argument for _, d in one.told} - {d.argument for _, d in one.wrong}
        rank, d = next((w for w in one.wrong if w[1].off or w[1].shares), one.wrong[0])
        lines = list(dict.fromkeys(line_and_code(*w.line) for _, w in one.wrong))
        names = list(dict.fromkeys(w.argument for _, w in one.wrong))
        told = _calls(one.told)
        # Of several arguments in as many as each of them.
        wrong = min(_calls([w for w in one.wrong if w[1].argument == name]) for name in names)
        often = f"all {told}" if wrong == told else f"at least {wrong} of {told}"
        how = "finite differences on all its ranks" if d.together else "finite differences"
        text = (f"what the backward of {one.function} gives for {some_of(names)} is {SAID}, by "
                f"{how}, in {often} calls that were looked at")  # fmt: skip
        text += f"; for {some_of(sorted(right))} it is" if right else ""
        yield f"{text}; it is called at {some_of(lines)}"
        yield from _off(rank, d)


def _calls(found: Sequence[tuple[int, Derivative]]) -> int:
    return len({(rank, d.line, d.call) for rank, d in found})


def _off(rank: int, d: Derivative) -> Iterator[str]:
    where = f"in call {d.call} of {line_from_here(d.line[0])} on rank {rank}"
    what = f"for one, {where} what it gives for {d.argument}"
    if d.shares:
        often = [f"{_short(times)} times what rank {r}'s result was given" for r, times in d.shares]
        yield f"{what} counts {', '.join(often)}; the derivative counts each once"
    if d.off is None:
        return
    if d.off.moved:
        yield f"{what} has the numbers of the derivative in other places"
        return
    if d.off.factors:
        yield f"{what} is {_times(d.off)}"
        return
    at = " and ".join(f"{spans(list(places))} of dimension {dim}" for dim, places in d.off.where)
    at = f", these at {at}" if at else ""
    zero = ", which are zero" if d.off.zero else ""
    yield f"{what} differs from it in at least {d.off.differ} of {d.off.numel} numbers{at}{zero}"


def _times(off: Off) -> str:
    if len(off.factors) == 1:
        return f"{_short(off.factors[0])} times the derivative"
    shares = [f"{_short(f)} times its {ordinal(i)} result's" for i, f in enumerate(off.factors)]
    return f"{', '.join(shares)} share of the derivative"


def _short(factor: float) -> str:
    """Finite differences give few digits."""
    near = Fraction(factor).limit_denominator(MOST_PARTS)
    return str(near) if abs(near - factor) <= DIGITS else fraction_of(round(factor, 6))


def with_formulas(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Beside a cause that is not proved, a Function whose formula is not right, but none that only
    scales. Where a module's gradient tells where it goes wrong, one that a line there calls."""
    traces = case.traces
    if traces is None or diagnosis.kind in OTHERS or diagnosis.standing == "proved":
        return diagnosis
    known = " ".join((diagnosis.cause, *diagnosis.because))
    if any(words in known for words in (SAID, OTHER_WAY, IN_ANOTHER_ORDER)):
        return diagnosis
    look = looked(case)
    found = None if look is None else first_wrong_backward(look, owners(case))
    lines = [] if found is None else first_lines(case, found, back=True)
    there = {(one.mine.function, one.mine.written) for one in lines}
    there |= set() if found is None else _beside(traces, found.modules)
    at_the_loss = diagnosis.kind in AT_THE_LOSS
    if at_the_loss or (found is not None and not found.modules and not lines):
        there |= _of_the_loss(traces)
    formulas = {
        key: one
        for key, one in _not_the_derivative(case).items()
        if not one.only_scales and (found is None or key in there)
    }
    moving = {
        key: one
        for key, one in wrong_movers(case).items()
        if not _only_scales(one) and _is_sure(one) and (found is None or key in there)
    }
    words = (*how_they_are_off([*formulas.values()]), *how_they_bring_back([*moving.values()]))
    first = at_the_loss or diagnosis.kind in WHERE
    because = (*words, *diagnosis.because) if first else (*diagnosis.because, *words)
    return replace(diagnosis, because=because)


def _beside(traces: Traces, modules: Sequence[str]) -> set[tuple[str, str]]:
    """The Functions that ranks call inside of what these modules are parts of: they may take what
    goes into them, too."""
    around = {name[:i] for name in modules for i, c in enumerate(name) if c == "."}
    return {
        (c.function, c.written)
        for trace in traces.ranks.values()
        for c in trace.computed.computations
        if c.written and not around.isdisjoint(c.inside[-1:])
    }


def _of_the_loss(traces: Traces) -> set[tuple[str, str]]:
    """The Functions that ranks call outside of all modules."""
    return {
        (c.function, c.written)
        for trace in traces.ranks.values()
        for c in trace.computed.computations
        if c.written and not c.inside
    }
