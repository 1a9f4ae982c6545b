"""What autograd passes between two modules, in words: functions with a backward of their own.

Torch's formulas are taken to be right: where the gradient goes wrong among them, it is at a
function that brings its own backward, or where autograd sees nothing: a detach, a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.outcome import some_of
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.derivatives import (
    WrongFunctions,
    are_the_derivative,
    wrong_functions,
)
from sumgrad.diagnose.explainers.by_modules.looked import line_and_code, line_from_here
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.on_the_way import passed_between
from sumgrad.record.trace import INTO, LOSS, Trace
from sumgrad.record.ways import MOVES, Passed

MOST_LINES = 6
PLAIN = {"Add", "Div", "Mul", "Sub", "Sum", "Mean"}  # what a step does with its loss, too
WRITES_PLACES = {"Scatter", "IndexPut", "IndexCopy", "MaskedScatter"}
MOST_CODE = 60  # characters of a line that are shown


def own_functions_between(
    case: Case,
    found: FirstWrong,
    ends: Sequence[str],
    *,
    again: bool = False,
    unwanted: bool = False,
) -> list[str]:
    """In the backward, down from `ends` (modules, what goes into them, or LOSS) to what is wrong.

    Nothing where the way was not recorded. again: it is computed again in the backward, and what
    the checkpoint passes there is not known. unwanted: it is wrong where the single process has no
    gradient, as of what is written over.
    """
    trace = _trace(case, found)
    if trace is None or not trace.ways:
        return []
    ways = {end: passed_between(trace, found.wrong, end) for end in ends}
    cut = [end for end, passed in ways.items() if passed is None]
    if cut and all(end in trace.ways for end in cut) and found.lost:
        where = some_of([_end(end) for end in cut])
        return [
            f"rank {found.ranks[0]}'s autograd knows no way from {found.wrong} to {where}: look "
            f"for a detach, a no_grad, or a collective without a backward there"
        ]
    passed = [p for one in ways.values() for p in one or ()]
    if not passed:
        return []
    own = list(dict.fromkeys(p for p in passed if p.written and not _only_waits(p)))
    proven = are_the_derivative(case)
    with_backward = [p for p in own if (p.function, p.written) not in proven]
    right = list(dict.fromkeys(p.function for p in own if p not in with_backward))
    text = [f"the backward of {some_of(right)} there is the derivative of its forward to four "
            f"digits, in the calls that were looked at"] if right else []  # fmt: skip
    if not with_backward:
        if again or LOSS in ends:
            return [*text, *_computed_there(passed)]
        return [*text, *_torchs_formulas(passed, unwanted=unwanted, beside=bool(right))]
    shown = some_of(_functions(with_backward[::-1]))
    computing = {p.function for p in passed if not p.written} - MOVES
    alone = len(own) == 1 and not computing and not cut
    if alone and with_backward[0].own:
        return []  # the cause says it
    told = f"what {'else ' * bool(right)}has a backward of its own there is {shown}"
    return [*text, told, *(_computed_there(passed) if LOSS in ends else ())]


def _computed_there(passed: Sequence[Passed]) -> list[str]:
    lines = lines_of(passed)
    return [f"computed there, as far as autograd knows: {lines}"] if lines else []


def _torchs_formulas(
    passed: Sequence[Passed], *, unwanted: bool, beside: bool = False
) -> Iterator[str]:
    """beside: Functions whose backward is right, and is said to be."""
    lines = lines_of(passed)
    written = [p for p in passed if p.function in WRITES_PLACES and p.line]
    if written and unwanted:
        yield (f"torch's formula for {some_of([line_and_code(p.line, p.code) for p in written])} "
               f"is right where no place is written twice: look at the places")  # fmt: skip
        return
    if lines:
        no_function = "nothing else" if beside else "no function"
        yield (f"{no_function} with a backward of its own runs there, torch's formulas alone: look "
               f"for what autograd does not see, as a hook, a detach, a change of .data, a "
               f"collective without a backward; lines: {lines}")  # fmt: skip


def wrong_functions_between(
    case: Case, found: FirstWrong, ends: Sequence[str]
) -> WrongFunctions | None:
    """Functions of the user's there that do not give the derivative of their forwards, where that
    explains what is wrong."""
    trace = _trace(case, found)
    ways = [passed_between(trace, found.wrong, end) for end in ends] if trace is not None else []
    passed = [p for one in ways for p in one or ()]
    return wrong_functions(case, passed, found.ratio)


def lacking_there(case: Case, found: FirstWrong, ends: Sequence[str]) -> list[str]:
    """Lines that autograd passes in the single process and not here, where nothing else is passed
    in their place: the rank's way is cut there."""
    traces, mine = case.traces, _trace(case, found)
    if traces is None or mine is None:
        return []
    there = _passed_on(traces.single, found.wrong, ends)
    here = _passed_on(mine, found.wrong, ends)
    lacks = [p for key, p in there.items() if key not in here]
    instead = [p for key, p in here.items() if key not in there and p.function not in PLAIN | MOVES]
    computed = [p for p in lacks if p.function not in PLAIN | MOVES]
    if not here or not computed or instead:
        return []
    names = some_of(list(dict.fromkeys(p.function for p in computed)))
    text = (f"in the single process autograd passes there {names} of {lines_of(computed)}, and on "
            f"rank {found.ranks[0]} not")  # fmt: skip
    run = {c.line for c in mine.computed.computations}
    if run and not run & {p.line for p in computed}:
        return [f"{text}, where nothing was seen to be computed at such a line"]
    return [f"{text}: look for a detach, a no_grad, or a graph that is not kept (create_graph)"]


def _passed_on(trace: Trace, start: str, ends: Sequence[str]) -> dict[tuple[str, str], Passed]:
    """By function and line."""
    ways = (passed_between(trace, start, end) for end in ends)
    return {(p.function, p.line): p for one in ways for p in one or ()}


def only_function_between(case: Case, found: FirstWrong, ends: Sequence[str]) -> str:
    """The one Function of the user's that is all that computes there; empty where there is none."""
    trace = _trace(case, found)
    ways = [passed_between(trace, found.wrong, end) for end in ends] if trace is not None else []
    passed = dict.fromkeys(p for one in ways for p in one or ())
    own = [p for p in passed if p.written and not _only_waits(p)]
    computing = {p.function for p in passed if not p.written} - MOVES
    if computing or None in ways or len(own) != 1 or not own[0].own:
        return ""
    return _functions(own)[0]


def has_functions_between(case: Case, found: FirstWrong, end: str) -> bool:
    """Whether a function with a backward of its own lies between what is wrong and `end`."""
    trace = _trace(case, found)
    passed = None if trace is None else passed_between(trace, found.wrong, end)
    return any(p.written and not _only_waits(p) for p in passed or ())


def lines_between(case: Case, found: FirstWrong, end: str) -> list[str]:
    """In the forward, from the right modules to `end`: the lines that compute what goes there."""
    trace = _trace(case, found)
    if trace is None:
        return []
    ways = [passed_between(trace, module, end) or () for module in found.modules]
    lines = lines_of([p for one in ways for p in one])
    return [f"computed in between, as far as autograd knows: {lines}"] if lines else []


def lines_in(case: Case, found: FirstWrong) -> list[str]:
    """The lines of what is wrong itself, in no module inside of it."""
    trace = _trace(case, found)
    own = () if trace is None else trace.computed.computations
    mine = [c for c in own if c.inside and c.inside[-1] == found.wrong]
    lines = lines_of([Passed(function=c.function, line=c.line, code=c.code) for c in mine])
    return [f"computed in its calls, in no module inside of it: {lines}"] if lines else []


def lines_of(passed: Sequence[Passed]) -> str:
    """The user's lines, each once; of many the first and the last ones."""
    lines = list(dict.fromkeys((p.line, p.code) for p in passed if p.line))
    if not lines:
        return ""
    lines.sort(key=lambda one: _number(one[0]))
    half, more = MOST_LINES // 2, len(lines) - MOST_LINES
    kept = [*lines[:half], *lines[-half:]] if more > 0 else lines
    shown, before = [], ""
    for line, code in kept:
        path, words = line.rpartition(":")[0], line_and_code(line, code, MOST_CODE)
        shown.append(words if path != before else words.removeprefix(line_from_here(path)))
        before = path
    if more > 0:
        shown.insert(half, "...")
    return "; ".join(shown)


def made_by(case: Case, names: Sequence[str]) -> list[str]:
    """Which functions' backwards give these parameters their gradients; nothing where it is not
    known of all, or all are torch's formulas."""
    passed = _makers(case, names)
    with_backward = [p for p in passed or () if p.written]
    if not with_backward:
        return []
    others = lines_of([p for p in passed or () if not p.written])
    also = f"; torch's formulas at {others} do, too" if others else ""
    return [f"{some_of(_functions(with_backward))} gives its gradient{also}"]


def own_makers(case: Case, names: Sequence[str]) -> str:
    """The user's Functions, in words, where each of these parameters has one that gives its
    gradient; else empty."""
    passed = [p for p in _makers(case, names) or () if p.own]
    each = all(any(p.own for p in _makers(case, [name]) or ()) for name in names)
    return some_of(_functions(passed)) if passed and each else ""


def wrong_makers(case: Case, names: Sequence[str]) -> WrongFunctions | None:
    """Of these those that do not give the derivative of their forwards."""
    return wrong_functions(case, _makers(case, names) or (), None, of_parameters=True)


def _makers(case: Case, names: Sequence[str]) -> list[Passed] | None:
    traces = case.traces
    ranks = {cell.name: cell.rank for cell in case.failing_cells}
    if traces is None or not {*names} <= {*ranks}:
        return None
    found = [traces.ranks[ranks[name]].makers.get(name) for name in names]
    return list(dict.fromkeys(p for one in found for p in one or ())) if None not in found else None


def _only_waits(p: Passed) -> bool:
    """Of FSDP: it hands gradients on, and frees what was gathered."""
    return not p.own and "fsdp" in p.written


def _trace(case: Case, found: FirstWrong) -> Trace | None:
    traces = case.traces
    return None if traces is None else traces.ranks.get(found.ranks[0])


def _functions(passed: Sequence[Passed]) -> list[str]:
    """Each once, in their order, with the lines that call it."""
    found: dict[tuple[str, str], list[Passed]] = {}
    for p in passed:
        found.setdefault((p.function, p.written), []).append(p)
    out = []
    for (function, written), calls in found.items():
        whose = f"backward at {line_from_here(written)}" if calls[0].own else "torch's own"
        lines = lines_of(calls)
        out.append(f"{function} ({whose}{f', called at {lines}' if lines else ''})")
    return out


def _end(end: str) -> str:
    return end.removeprefix(INTO)


def _number(line: str) -> tuple[str, int]:
    path, _, number = line.rpartition(":")
    return path, int(number)
