"""What lies between what is right and the first wrong module, in words: lines and collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sumgrad.base.files import is_librarys
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.backwards.passed import lines_between, lines_in
from sumgrad.diagnose.explainers.by_modules.between import between, told_of
from sumgrad.diagnose.explainers.by_modules.forwards.entering import entered_wrong
from sumgrad.diagnose.explainers.by_modules.in_code.arguments_there import arguments_there
from sumgrad.diagnose.explainers.by_modules.in_code.brought import brought_into
from sumgrad.diagnose.explainers.by_modules.in_code.kept import kept_for_the_call, kept_in_words
from sumgrad.diagnose.explainers.by_modules.in_code.lines import (
    first_lines,
    in_words,
    taken_in_words,
)
from sumgrad.diagnose.explainers.by_modules.in_code.masked import masked_in_words
from sumgrad.diagnose.explainers.by_modules.in_code.run_between import run_in_words
from sumgrad.diagnose.explainers.by_modules.looked import gone_into, line_and_code, ordinal
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import Look
from sumgrad.record.line import Line
from sumgrad.record.trace import INTO, Traces


def in_between(
    case: Case, look: Look, found: FirstWrong, parts: Sequence[str], *, leads: bool = False
) -> Iterator[str]:
    """Lines and collectives on the way. parts: what is said of what is there in parts. leads: a
    line leads the report, so that none has to be guessed."""
    entered = entered_wrong(case, found)
    yield from _lines(case, look, found, entered, leads=leads)
    since = replace(found, seen=entered or found.seen)
    yield from parts or between(case, since, back=False, only_some=leads)


def _lines(
    case: Case, look: Look, found: FirstWrong, entered: Sequence[Seen], *, leads: bool
) -> Iterator[str]:
    lines, made = first_lines(case, found, back=False), made_before(case, entered)
    if made and all(is_librarys(one.mine.line) for one in lines):
        lines = []  # what it makes of that is the library's
    follows = made if any(found.wrong in one.mine.inside for one in lines) else []
    if not leads:
        yield from follows  # what is computed of it inside is another for that reason
        yield from in_words(lines)
    if lines:
        yield from kept_in_words(case, lines[0].rank, lines[0].place)
    else:
        yield from kept_for_the_call(case, found.wrong, found.seen)
    yield from masked_in_words(case, lines)
    yield from arguments_there(case, lines)
    if not leads and not (lines and all(one.told for one in lines)):
        # Of one of several outputs the ways are those of all together.
        several = not entered and len({s.call.part for s in look.seen[found.wrong]}) > 1
        end = f"{INTO}{found.wrong}" if entered else found.wrong
        ways = lines_in(case, found) if several else lines_between(case, found, end)
        yield from () if follows else run_in_words(case, entered) or made or ways


def made_before(case: Case, entered: Sequence[Seen]) -> list[str]:
    """The line of a user's own that made what goes in, of the call that is told of."""
    traces = case.traces
    if traces is None or not entered:
        return []
    s = told_of(entered)
    made = traces.ranks[s.rank].stack(s.call).made
    where = f"on rank {s.rank} in call {s.call.number}"
    if not made[0] or is_librarys(made[0]):
        return []
    several = len({x.call.part for x in gone_into(case, s.call.module.removeprefix(INTO))}) > 1
    what = f"the {ordinal(s.call.part)} tensor that goes in" if several else "what goes in"
    said = f"{where} {what} was made at {line_and_code(*made)}"
    return [said, *_made_of(traces, s.rank, made), *brought_into(traces, s.rank, made)]


def _made_of(traces: Traces, rank: int, made: Line) -> list[str]:
    """Where what a line takes was made, of the first that it computes with several tensors."""
    every = traces.ranks[rank].computed.computations
    found = (c for c in every if (c.line, c.code) == made)
    several = next((c for c in found if sum(isinstance(t, int) for t in c.takes) > 1), None)
    here = [c for c in every if c.line == made[0]]
    return [] if several is None else taken_in_words(rank, several, here)
