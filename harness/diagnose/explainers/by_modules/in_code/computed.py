"""The first line that is found to compute with something else than the single process, in words.

Lines before it may do so, too, where nothing tells what they have to compute with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.derivatives import SAID
from sumgrad.diagnose.explainers.by_modules.in_code.brought import made_on_another_rank
from sumgrad.diagnose.explainers.by_modules.in_code.kept import kept_in_words
from sumgrad.diagnose.explainers.by_modules.in_code.lines import known_lines, made_from
from sumgrad.diagnose.explainers.by_modules.in_code.run_between import made_in_words
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    fraction_of,
    line_and_code,
    looked,
    ordinal,
    owners,
)
from sumgrad.diagnose.explainers.by_modules.rows.handed import ROWS_ALONE, is_handed_before
from sumgrad.diagnose.fit import as_fraction
from sumgrad.diagnose.modules.in_code.computed_otherwise import (
    Difference,
    Otherwise,
    computed_otherwise,
)
from sumgrad.diagnose.modules.in_code.made_by import before_it_was_cut, line_that_computed
from sumgrad.diagnose.modules.values.comparable import ATTENTION, CTC, OF_CLASSES
from sumgrad.diagnose.modules.where.first_wrong import first_wrong_backward, first_wrong_forward
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.diagnose.names import axis_groups
from sumgrad.record.computed import Computed
from sumgrad.record.trace import LOSS, Trace

A_LINE = "a line computes with something else than the single process does:"
LEADS = ("forward", "backward", "recomputed", "open", "own_backward")  # that say no more than where
LINEAR = ("add", "sub", "rsub")
BESIDE = ("loss_weights", "loss_at_tokens", "row_factors", "term_factor", "factor",
          "param_factors", "term_by_rows")  # fmt: skip


def with_the_line(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A cause that says where to look, and the line there."""
    if diagnosis.kind not in (*LEADS, *BESIDE):
        return diagnosis
    found = lines_that_differ(case)
    if not found or (diagnosis.kind == "backward" and not _at_the_loss(case)):
        return diagnosis
    line = _in_words(case, found)
    ranks = tuple(sorted({*diagnosis.ranks, *(one.rank for one in found)}))
    sent = _where_from(case, found[0])
    if SAID in diagnosis.cause:  # a Function's backward explains it
        return replace(diagnosis, because=(*diagnosis.because, line, *sent))
    if diagnosis.kind in BESIDE or _comes_after(case, diagnosis, found):
        return replace(diagnosis, because=(line, *sent, *diagnosis.because), ranks=ranks)
    because: tuple[str, ...] = (*sent, diagnosis.cause.removeprefix("open: "))
    if diagnosis.kind != "open":  # that no factors fit is no news then
        because += diagnosis.because
    return replace(diagnosis, cause=line, because=because, standing="likely", ranks=ranks)


def _where_from(case: Case, one: Otherwise) -> list[str]:
    """Of the argument: who sent it, or where it was kept; else which lines made it."""
    if told := [*_sent_from(case, one), *kept_in_words(case, one.rank, one.place)]:
        return told
    number = one.mine.takes[one.at]
    return made_in_words(case, one.rank, number) if isinstance(number, int) else []


@as_a_hint
def _sent_from(case: Case, one: Otherwise) -> list[str]:
    """Where the argument is a part of what another rank sent: the line that made it there."""
    traces = case.traces
    if traces is None:
        return []
    computed = traces.ranks[one.rank].computed
    number = before_it_was_cut(computed.computations[: one.place], one.mine.takes[one.at])
    if number is None:
        return []
    return made_on_another_rank(traces, one.rank, computed.values[number])


def _comes_after(case: Case, diagnosis: Diagnosis, found: Sequence[Otherwise]) -> bool:
    """Whether the lines are inside of a module that is handed something else for just its wrong
    rows, as the cause says."""
    look = looked(case) if ROWS_ALONE in diagnosis.cause else None
    wrong = None if look is None else first_wrong_forward(look)
    if look is None or wrong is None:
        return False
    return all(is_handed_before(case, look, wrong, one.mine) for one in found)


def _at_the_loss(case: Case) -> bool:
    """Whether the gradient is wrong from the loss on, or where a part of the loss uses what is
    wrong: further down no value can be the cause."""
    look = looked(case)
    found = None if look is None else first_wrong_backward(look, owners(case))
    return found is not None and (not found.modules or LOSS in found.beside)


def lines_that_differ(case: Case) -> Sequence[Otherwise]:
    """Of each rank the first, where that is the first line of any; empty where none is known."""
    if "computed" not in case.known:
        try:
            case.known["computed"] = _lines_that_differ(case)
        except (RuntimeError, ValueError, LookupError):
            case.known["computed"] = ()  # as in looked(): a cause is not lost by a hint
    found: Sequence[Otherwise] = case.known["computed"]
    return found


def _lines_that_differ(case: Case) -> Sequence[Otherwise]:
    traces = case.traces
    if traces is None:
        return ()
    if case.record.spec.tiers[case.tier] != "float64":
        return ()
    every = [list(_before_the_first_wrong(case, rank, trace, traces.single.computed))
             for rank, trace in traces.ranks.items()]  # fmt: skip
    sure = {_line(one) for own in every for one in own if one.is_sure}
    found = [next((one for one in own if _line(one) in sure), None) for own in every]
    first = min((f for f in found if f is not None), key=lambda f: f.place, default=None)
    if first is None:
        return ()
    return [f for f in found if f is not None and _line(f) == _line(first)]


def _before_the_first_wrong(
    case: Case, rank: int, mine: Trace, whole: Computed
) -> Iterator[Otherwise]:
    """Those that are not inside of a module which gives what is right all the same, and are there
    before the first module which gives what is wrong."""
    look = looked(case)
    right: set[str] = set()
    for module, found in look.seen.items() if look else ():
        own = {s.forward for s in found if s.rank == rank and not s.call.recomputed}
        right |= {module} if own == {"right"} else set()
    end = _first_wrong_call(look, rank, mine)
    parts: set[int | str] = set()  # what is made of what is a part on each rank
    for one in computed_otherwise(rank, mine.computed, whole):
        if end is not None and one.mine.calls > end:
            return
        if not right.isdisjoint(one.mine.inside) or one.mine.takes[one.at] in parts:
            continue
        if _is_a_part(case, one, whole) or _is_a_share(case, one):
            runs = (c for c in mine.computed.computations if c.site == one.mine.site)
            parts |= made_from(case, rank, [n for c in runs for n in c.gives])
        else:
            yield one


def _is_a_part(case: Case, one: Otherwise, whole: Computed) -> bool:
    """Whether what a line adds or takes off is a part on each rank, which their sum has whole."""
    lines, mine, its = known_lines(case), one.mine.takes[one.at], one.its.takes[one.at]
    if one.mine.function not in LINEAR or not isinstance(mine, int) or not isinstance(its, int):
        return False
    return lines is not None and lines.states.adds_up(one.rank, mine, whole.values[its])


def _is_a_share(case: Case, one: Otherwise) -> bool:
    """Whether a line multiplies by a number of which each rank has a share, and all have together
    what the single process has: as of how many of something a rank looks at."""
    traces = case.traces
    if traces is None or not isinstance(one.its.takes[one.at], str):
        return False
    own = traces.ranks[one.rank].computed.computations
    number = sum(c.site == one.mine.site for c in own[: one.place])
    there = _numbers_at(traces.single.computed, one.its.site, one.at)
    for group in (g for _, groups in axis_groups(case) for g in groups if one.rank in g):
        every = [_numbers_at(traces.ranks[r].computed, one.mine.site, one.at) for r in group]
        total = sum(share for shares in every for share in shares[number : number + 1])
        if any(math.isclose(total, whole) for whole in there):
            return True
    return False


def _numbers_at(computed: Computed, site: str, at: int) -> list[float]:
    """By what a call in the code multiplies, each time; NaN where that is no number."""
    found = []
    for c in computed.computations:
        if c.site == site and c.function == "mul":
            taken = c.takes[at]
            found.append(_as_number(taken) if isinstance(taken, str) else math.nan)
    return found


def _as_number(taken: str) -> float:
    """NaN of what is none."""
    try:
        return float(taken)
    except ValueError:
        return math.nan


def _first_wrong_call(look: Look | None, rank: int, mine: Trace) -> int | None:
    """The place among a rank's calls of what the first wrong module gives there."""
    wrong = None if look is None else first_wrong_forward(look)
    if wrong is None:
        return None
    numbers = {s.call.number for s in wrong.seen if s.rank == rank}
    places = (i for i, call in enumerate(mine.calls)
              if call.module == wrong.wrong and call.number in numbers)  # fmt: skip
    return min(places, default=-1)


def _line(one: Otherwise) -> tuple[str, str, int]:
    return one.mine.line, one.mine.function, one.at


def _in_words(case: Case, found: Sequence[Otherwise]) -> str:
    one = found[0]
    mine, its, what = one.mine, one.its, _argument(one)
    line, code = mine.made_at[one.at]
    if line and all(o.mine.made_at[o.at][0] == line for o in found):
        made = f" at {line_and_code(line, code)}" if line != mine.line else ""
        made += _made_of(case, one)
        what += f", made{made}," if made else ""
    if one.how.spread is not None:
        said = f"{_spread(one)} on rank {spans(sorted(o.rank for o in found))}"
    elif mine.function != ATTENTION and (
        any(o.how.elsewhere for o in found) or (mine.function in OF_CLASSES and one.at)
    ):  # of targets nothing tells which of the two belongs to other rows
        there = ", though the numbers of each are there"
        said = (f"the {what} and the {_beside(case, one)} do not belong together"
                f"{there if all(o.how.elsewhere for o in found) else ''}: "
                f"{'; '.join(_how(case, found, together=False))}")  # fmt: skip
    else:
        said = f"the {what} is {'; '.join(_how(case, found))}"
    beside = (
        "" if mine.line == its.line else f", where that has {line_and_code(its.line, its.code)}"
    )
    return f"{A_LINE} {line_and_code(mine.line, mine.code)}{beside}: {said}"


def _made_of(case: Case, one: Otherwise) -> str:
    """Where a library's line or one that only cuts and shapes made it of one tensor, and that of
    one: the line of the step's own that computed it."""
    traces, near = case.traces, {one.mine.line, one.mine.made_at[one.at][0]}
    if traces is None:
        return ""
    line = line_that_computed(traces.ranks[one.rank].computed, one.mine.takes[one.at], near)
    return f" of what {line_and_code(*line)} gives" if line[0] else ""


def _beside(case: Case, one: Otherwise) -> str:
    """The argument that it does not belong to, and where that is made."""
    line, code = one.mine.made_at[one.beside]
    traces = case.traces
    if traces is not None and (not line or line == one.mine.line):
        computed = traces.ranks[one.rank].computed
        line, code = line_that_computed(computed, one.mine.takes[one.beside], {one.mine.line})
    which = one.mine.key(one.beside) or ordinal(one.beside)
    made = f", made at {line_and_code(line, code)}" if line and line != one.mine.line else ""
    return f"{which} one{made}"


def _spread(one: Otherwise) -> str:
    assert one.how.spread is not None
    first, second = (f"({', '.join(map(str, shape))})" for shape in one.how.spread)
    num = torch.broadcast_shapes(*one.how.spread).numel()
    return (
        f"`{one.mine.function}` of shapes {first} and {second} pairs every number of one with "
        f"every number of the other, {num} in all; there each has its own"
    )


def _when(case: Case, one: Otherwise) -> str:
    """Which of the times that a rank runs the line there; nothing where it is the only one."""
    traces = case.traces
    every = () if traces is None else traces.ranks[one.rank].computed.computations
    key = one.mine.site, one.mine.function
    times = [i for i, c in enumerate(every) if (c.site, c.function) == key]
    if len(times) < 2 or one.place not in times:
        return ""
    which = times.index(one.place)
    return f"the {ordinal(which)} of the {len(times)} times that it runs"


def _how(case: Case, found: Sequence[Otherwise], *, together: bool = True) -> Iterator[str]:
    """How it differs, ranks alike together. together: whether it is told by itself, and not by what
    it stands beside."""
    alike: dict[str, list[int]] = {}
    for one in found:
        words = _differs if together else _stands_beside
        alike.setdefault(words(one, one.how, _when(case, one)), []).append(one.rank)
    for text, ranks in alike.items():
        yield f"{text} on rank {spans(sorted(ranks))}"


def _differs(one: Otherwise, how: Difference, when: str) -> str:
    numbers = f"{how.now:.6g} where there it is {how.was:.6g}"
    if one.mine.function == ATTENTION:
        heads = "of other heads or rows" if how.elsewhere else "another"
        keys = f"another: {how.now:g} keys for a query where there it is {how.was:g}"
        if how.now % 1 or how.was % 1:
            keys = "another, with other numbers for the keys of a query"
        return (
            f"{heads} in {how.num} of the {how.of} heads of all its rows"
            if one.at in (1, 2)
            else keys
        )
    if one.mine.function == CTC and one.at == 1:
        return f"another in {how.num} of {how.of} rows"
    tells = how.of > 1 or (how.factor is not None and as_fraction(how.factor, 1e-9) is not None)
    if how.factor is not None and tells and not how.elsewhere:
        text = f"{fraction_of(how.factor)} times what it is there"
        text = text if how.factor else f"zero, and there it is not (for one: {how.was:.6g})"
        shown = numbers if isinstance(one.mine.takes[one.at], str) else ""
        return f"{text}{_in_brackets(when, shown)}"
    if how.several:
        return "another than in any call there that has the rest of it"
    few = _in_so_many(how)
    first = f"{'for one: ' if how.of > 1 else ''}{numbers}"
    return f"another{f' {few}' if how.num < how.of else ''}{_in_brackets(when, first)}"


def _stands_beside(one: Otherwise, how: Difference, when: str) -> str:
    if how.several:
        return f"they stand together in no call there{_in_brackets(when)}"
    beside = f"for one: {how.now:.6g} stands beside what has {how.was:.6g} there"
    few = _in_so_many(how)
    return f"{few}{_in_brackets(when, beside)}"


def _in_so_many(how: Difference) -> str:
    """What has the numbers of another row there is not counted."""
    at_least = "at least " if how.num < how.of else ""
    return f"in {at_least}{how.num} of {how.of} elements that could be compared"


def _in_brackets(*said: str) -> str:
    told = "; ".join(text for text in said if text)
    return f" ({told})" if told else ""


def _argument(one: Otherwise) -> str:
    of = f"of `{one.mine.function}`"
    if key := one.mine.key(one.at):
        return f"argument {key} {of}"
    return f"{ordinal(one.at)} argument {of}"
