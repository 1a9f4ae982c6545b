"""The first line that gives what the single process has nowhere, or its backward, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    fraction_of,
    line_and_code,
    line_from_here,
    looked,
    ordinal,
)
from sumgrad.diagnose.modules.in_code.lines import AtLine, Lines
from sumgrad.diagnose.modules.in_code.lines_across_ranks import (
    nothing_goes_back,
    only_of_parts,
    picks_by_parts,
    sent_back,
)
from sumgrad.diagnose.modules.values.seen import TOLERANCES
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.names import axis_groups
from sumgrad.record.computed import MODULE, Computation

MOST_THEN = 8  # lines that follow, which are shown
MOST_TAKEN = 3  # lines that made what a line takes, which are shown


def first_lines(case: Case, found: FirstWrong, *, back: bool) -> list[AtLine]:
    """Of the wrong ranks the first line, where it is the same one; empty where none is known. Not
    one that the ranks have where all is right."""
    try:
        return _first_lines(case, found, back=back)
    except (RuntimeError, ValueError, LookupError):
        return []  # as in looked(): a cause is not lost by a hint


def _first_lines(case: Case, found: FirstWrong, *, back: bool) -> list[AtLine]:
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return []
    asked = {rank: asked_between(case, found, rank, back=back) for rank in traces.ranks}
    if not back:
        return agreed(lines.first_forward, asked, found.ranks)
    told = agreed(lines.first_backward, asked, found.ranks)
    parts: list[AtLine] = []
    if not told and not found.modules:
        ways = agreed(lines.first_forward, asked, found.ranks)
        # The loss is no module's: its lines are the single process's, or nothing is told by them,
        # but where no sum could make them right.
        told = [one for one in ways if one.there and not one.at and not one.parts]
        parts = [one for one in ways if not one.at and one.parts and only_of_parts(lines, one)]
    if not told:
        told = agreed(lines.kept, asked, found.ranks)
    if not told and not _recomputes(case):
        told = agreed(lines.cuts, asked, found.ranks)
    return told or parts or _told_by_other_ranks(case, lines, found, asked)


def _told_by_other_ranks(
    case: Case, lines: Lines, found: FirstWrong, asked: Mapping[int, Callable[[Computation], bool]]
) -> list[AtLine]:
    """What picks by parts, or what a later stage gives back, where no line of the wrong ranks is
    wrong by itself."""
    if not found.modules:
        # Where it is right all the same, a part happens to pick what the sum does.
        wrong = {rank: asked[rank] for rank in found.ranks}
        if told := agreed(partial(picks_by_parts, lines), wrong, found.ranks):
            return told
    others = [rank for rank in asked if rank not in found.ranks]
    return agreed(lambda rank, _: sent_back(lines, rank, found.ranks), asked, others)


@as_a_hint
def into_the_loss(case: Case, found: FirstWrong) -> list[str]:
    """Where the gradient is wrong from the loss on: the last line that takes what is right, and
    gives it another gradient."""
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return []
    asked = {rank: asked_between(case, found, rank, back=True) for rank in traces.ranks}
    told = agreed(lines.into_the_loss, asked, found.ranks)
    if not told:
        return []
    on = f"on rank {spans(sorted(o.rank for o in told))}"
    return [f"from the loss down the first gradient that is wrong {on}, of those that could be "
            f"compared, is that of the {_arguments(told)} of {expression(told[0].mine)}, "
            f"itself right", *_beside_it(lines, told[0])]  # fmt: skip


def _beside_it(lines: Lines, one: AtLine) -> list[str]:
    """What else such a line takes, where the single process has it nowhere, or has nowhere what
    comes of it."""
    wrong, others = list[str](), list[str]()
    for at, taken in enumerate(one.mine.takes):
        line, code = one.mine.made_at[at] if at < len(one.mine.made_at) else ("", "")
        if at in one.at or not isinstance(taken, int) or not line or line == one.mine.line:
            continue
        said = f"its {ordinal(at)} argument, made at {line_and_code(line, code)}"
        if lines.states.forward(one.rank, taken) == "wrong":
            wrong.append(f"{said}, is nothing that the single process has, on rank {one.rank}")
        others.append(f"; {said}, goes into that, too")
    if not wrong and _gives_something_else(lines, one):
        wrong.append(f"what that line gives is nothing that the single process has, of what it "
                     f"has, on rank {one.rank}{''.join(others)}")  # fmt: skip
    return wrong


def _gives_something_else(lines: Lines, one: AtLine) -> bool:
    """Whether such a line is a forward's first that is wrong, and what it takes is right."""
    found = next(lines.first_forward(one.rank, lambda c: c is one.mine), None)
    return found is not None and found.told and not found.at and not found.parts and not found.again


def lines_of_another_graph(case: Case) -> list[AtLine]:
    """Of all ranks the first line that autograd passes, and does not in the single process; else
    the first that it does not pass, and does there."""
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return []
    asked = dict.fromkeys(traces.ranks, lambda _: True)
    try:
        if kept := agreed(lines.kept, asked, [*asked]):
            return kept
        cuts = [] if _recomputes(case) else agreed(lines.cuts, asked, [*asked])
        return cuts or agreed(partial(nothing_goes_back, lines), asked, [*asked])
    except (RuntimeError, ValueError, LookupError):
        return []


def lines_inside(case: Case, modules: Sequence[str]) -> list[AtLine]:
    """Of all ranks, which give their parts of a gradient, the first line in the forward of one of
    these modules, or of any where there are none, that cuts the graph, or whose backward goes
    wrong."""
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return []
    asked = dict.fromkeys(
        traces.ranks, lambda c: not modules or not {*modules}.isdisjoint(c.inside)
    )
    try:
        cuts = [] if _recomputes(case) else agreed(lines.cuts, asked, [*asked])
        return cuts or agreed(lines.first_backward, asked, [*asked])
    except (RuntimeError, ValueError, LookupError):
        return []


def agreed(
    search: Callable[[int, Callable[[Computation], bool]], Iterator[AtLine]],
    asked: Mapping[int, Callable[[Computation], bool]],
    ranks: Sequence[int],
) -> list[AtLine]:
    """What is the first on most of the ranks, of those where it is.

    Not lines from which something right is made again, on whatever rank: there they are meant.
    """
    every = {rank: list(search(rank, own)) for rank, own in asked.items()}
    usual = {one.mine.site for found in every.values() for one in found if one.again}
    usual |= {one.mine.site for rank, found in every.items() if rank not in ranks for one in found}
    firsts: list[AtLine] = []
    for rank in ranks:
        first = next((o for o in every[rank] if o.mine.site not in usual), None)
        if first is not None:
            firsts.append(first)
    sites = [one.mine.site for one in firsts]
    return [one for one in firsts if one.mine.site == max(sites, key=sites.count)]


def known_lines(case: Case) -> Lines | None:
    traces, dtype = case.traces, case.record.spec.tiers[case.tier]
    if traces is None or dtype != "float64":
        return None
    found: Lines = case.record.once(
        f"lines/{case.tier}/{case.step}",
        lambda: Lines(traces, axis_groups(case), TOLERANCES[dtype]),
    )
    return found


def made_from(case: Case, rank: int, numbers: Sequence[int]) -> set[int]:
    """These values of a rank, and all that its lines make of them."""
    lines = known_lines(case)
    return {*numbers} if lines is None else {*numbers, *lines.after(rank, numbers)}


def asked_between(
    case: Case, found: FirstWrong, rank: int, *, back: bool, beyond: int = 0
) -> Callable[[Computation], bool]:
    """Whether a rank's computation lies between what is right and what is wrong, and inside of no
    module that gives what is right. beyond: of the forward, up to so many calls later."""
    look, traces = looked(case), case.traces
    if look is None or traces is None:
        return lambda _: False
    calls = traces.ranks[rank].calls
    numbers = {s.call.number for s in found.seen if s.rank == rank} or {0}
    wrong = [i for i, c in enumerate(calls) if c.module == found.wrong and c.number in numbers]
    if back:
        start = min(wrong, default=-1)
        return lambda c: c.calls > start
    right = {
        module
        for module, seen in look.seen.items()
        if {s.forward for s in seen if s.rank == rank and not s.call.recomputed} == {"right"}
    }
    end = min(wrong, default=len(calls)) + beyond
    return lambda c: c.calls - c.function.startswith(MODULE) <= end and right.isdisjoint(c.inside)


def _recomputes(case: Case) -> bool:
    traces = case.traces
    return traces is not None and any(
        call.recomputed for trace in traces.ranks.values() for call in trace.calls
    )


def _back_in_words(found: Sequence[AtLine], line: str, on: str) -> Iterator[str]:
    one = found[0]
    written = one.mine.written
    where = f" (backward at {line_from_here(written)})" if written else ""
    others = [o for o in one.beside if o.function != one.mine.function]
    too = f"; {some_of([_function(o) for o in others])} takes it, too" if others else ""
    within = f" in {one.mine.inside[-1]}" if one.mine.inside and one.mine.inside[-1] else ""
    wrong = "wrong" if one.times is None else f"{fraction_of(one.times)} times what is right"
    beside = some_of([expression(o) for o in one.untold])
    first = "" if beside else "where it goes wrong first, "
    or_there = f"; {beside} takes the same: what is wrong may come from there" if beside else ""
    yield (f"{first}the gradient that reaches the result of {line}{within} is right {on}, and "
           f"that of its {_arguments(found)}{where} is {wrong}{too}{or_there}"
          )  # fmt: skip
    if not written:
        yield ("it is torch's own formula: look at what changes what it kept, before the "
               "backward, and at other uses of that argument")  # fmt: skip


def in_words(found: Sequence[AtLine]) -> Iterator[str]:
    if not found:
        return
    one, on = found[0], f"on rank {spans(sorted(o.rank for o in found))}"
    line = expression(one.mine)
    if one.sender is not None:
        sender, its = one.sender
        yield (f"autograd knows nothing of the {_arguments(found)} of {line} {on}, whose numbers "
               f"rank {sender} made at {expression(its)}: no gradient goes back there from here, "
               f"and in the single process one reaches the same numbers")  # fmt: skip
    elif one.cut:
        yield (f"autograd knows nothing of what {line} gives {on}, and in the single process a "
               f"gradient reaches the same numbers")  # fmt: skip
    elif one.kept:
        yield (f"a gradient reaches what {line} gives {on}, and in the single process autograd "
               f"knows nothing of the same numbers: look for a detach or a no_grad that is missing"
              )  # fmt: skip
    elif one.back:
        yield from _back_in_words(found, line, on)
    elif one.at:
        made = _made(one)
        yield (f"the {_arguments(found)} of {line}{made} is nothing that the single process has "
               f"anywhere {on}, and no torch function that was seen gives it: look at where it "
               f"comes from")  # fmt: skip
    elif one.picks:
        yield (f"{line} picks by what is right only as a sum over ranks, {on}: each of them picks "
               f"by its own part")  # fmt: skip
        yield from taken_in_words(one.rank, one.mine)
    elif one.parts:
        yield (f"{line} takes what is right only as a sum over ranks, and what it gives is none of "
               f"the single process's, nor are its sums, {on}: right before a sum is what is "
               f"linear, and added once")  # fmt: skip
        yield from taken_in_words(one.rank, one.mine)
    else:
        told = all(o.told for o in found)
        of = ", of vectors that it has" if all(o.whole for o in found) else ""
        beside = "" if told else "; not all that it takes could be told"
        beside += _written(one)
        if one.there:
            yield (f"this line gives what the single process has nowhere{of}: {line}, "
                   f"{on}{beside}")  # fmt: skip
            yield from taken_in_words(one.rank, one.mine)
        else:
            yield (f"this line, which the single process does not run, gives what was not seen "
                   f"there{of}: {line}, {on}{beside}")  # fmt: skip
            yield from taken_in_words(one.rank, one.mine)
            yield from _then(one)


def taken_in_words(rank: int, mine: Computation, beside: Sequence[Computation] = ()) -> list[str]:
    """Where else what a line takes was made. beside: the same rank's, of which those in the line
    hand on what they take."""
    made: dict[str, str] = {}
    todo, unknown = [mine], False
    while todo:
        one = todo.pop(0)
        for taken, (line, code) in zip(one.takes, one.made_at, strict=False):
            if line and line != mine.line:
                made[line] = code
            elif line:
                within = [c for c in beside if taken in c.gives and c is not one][:1]
                todo += within
                unknown |= not within
            else:
                unknown = True
        unknown |= len(one.made_at) < len(one.takes)
    shown = [line_and_code(line, code) for line, code in [*made.items()][:MOST_TAKEN]]
    some = "some of " if unknown or len(made) > len(shown) else ""
    lines = ", and at ".join(shown)
    return [f"{some}what it takes on rank {rank} is made at {lines}"] if shown else []


def _then(one: AtLine) -> list[str]:
    """Lines behind it that are wrong, too, and nothing tells whether not of themselves."""
    known = {one.mine.line}
    lines = {c.line: c.code for c in one.then if c.line not in known}
    if not lines:
        return []
    path = one.mine.line.rpartition(":")[0]
    shown = [line_and_code(line.removeprefix(path), code) for line, code in lines.items()]
    more = f" and {len(shown) - MOST_THEN} more" if len(shown) > MOST_THEN else ""
    return [f"what it should give is not known, so it may be right, and what is wrong behind it, "
            f"on ranks alone, as at {', '.join(shown[:MOST_THEN])}{more}"]  # fmt: skip


def expression(mine: Computation) -> str:
    """A line, with what stands there, and which part of it where it has several."""
    text = line_and_code(mine.line, mine.code)
    whole = mine.code.removeprefix("return ").partition(" = ")
    if mine.part and mine.part not in (whole[0], whole[2]) and len(mine.part) < len(mine.code):
        text += f", in it `{mine.part}`"
    return text


def _function(c: Computation) -> str:
    return f"{c.function} (backward at {line_from_here(c.written)})"


def _written(one: AtLine) -> str:
    """Of what it takes, the first whose memory another line had written into before."""
    for at, (line, code) in enumerate(one.mine.written_at):
        if line:
            made = line_and_code(*one.mine.made_at[at])
            return (f"; its {ordinal(at)} argument, made at {made}, is of memory that "
                    f"{line_and_code(line, code)} had written into")  # fmt: skip
    return ""


def _made(one: AtLine) -> str:
    line, code = one.mine.made_at[one.at[0]]
    return f", made at {line_and_code(line, code)}," if line and line != one.mine.line else ""


def _arguments(found: Sequence[AtLine]) -> str:
    """`second argument`, `argument` where there is one; of several ranks what all have so."""
    takes, of_each = found[0].mine.takes, [{*one.at} for one in found]
    every = sorted(set.intersection(*of_each) or set.union(*of_each))
    if sum(isinstance(t, int) for t in takes) == 1:
        return "argument"
    if any(found[0].mine.key(i) for i in every):
        names = [found[0].mine.key(i) or ordinal(i) for i in every]
        return f"argument{'s'[: len(names) > 1]} {some_of(names)}"
    words = [ordinal(i) for i in every]
    tensors = "tensor " if found[0].mine.written else ""  # of a Function only these are seen
    return f"{some_of(words)} {tensors}argument{'s'[: len(words) > 1]}"
