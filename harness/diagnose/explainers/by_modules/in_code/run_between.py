"""What ranks ran between what is right and the first wrong module, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from sumgrad.base.files import is_librarys
from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import told_of
from sumgrad.diagnose.explainers.by_modules.in_code.lines import in_words, known_lines
from sumgrad.diagnose.explainers.by_modules.looked import as_a_hint, line_and_code, line_from_here
from sumgrad.diagnose.modules.in_code.made_by import SHAPING
from sumgrad.diagnose.modules.in_code.run_between import Run, RunBetween
from sumgrad.diagnose.modules.values.seen import Seen

MOST_LINES = 8  # more are no hint
MOST_CODE = 70  # characters of a line that are shown


@as_a_hint
def run_in_words(case: Case, entered: Sequence[Seen]) -> list[str]:
    """Of the call that is told of, from what is right to what goes in: the lines of every rank on
    the way; nothing of a single line, or of too many."""
    if not entered or case.traces is None:
        return []
    s = told_of(entered)
    back = _back(case)
    value = case.traces.ranks[s.rank].outputs[s.at]
    number = None if back is None else back.number_of(s.rank, value, s.at)
    if back is None or number is None:
        return []
    runs = back.back_from(s.rank, number)
    way = _way(runs)
    return [
        *_sent(case, runs, s.rank),
        *(f"what goes in on rank {s.rank} in call {s.call.number} is made {text}" for text in way),
    ]


@as_a_hint
def made_in_words(case: Case, rank: int, number: int) -> list[str]:
    """The same of one value of a rank."""
    back = _back(case)
    runs = [] if back is None else back.back_from(rank, number)
    way = [f"that argument is made {text}" for text in _way(runs)]
    return [*_sent(case, runs, rank), *way]


def _way(runs: Sequence[Run]) -> list[str]:
    """From what is right on: the user's own lines by rank; of many those that compute something,
    and the last."""
    shown = [
        run
        for run in reversed(runs)
        if run.made.line and not is_librarys(run.made.line) and "zeros" not in run.made.function
    ]
    ranks = _ranks_by_line(shown)
    if len(ranks) > MOST_LINES:
        ranks = _ranks_by_line(
            [run for run in shown if run.made.function not in SHAPING or run is shown[-1]]
        )
    if not 1 < len(ranks) <= MOST_LINES:
        return []
    codes = {run.made.line: run.made.code for run in shown}
    options: dict[str, set[tuple[str, str] | None]] = {}
    for run in (run for run in shown if run.first):
        options.setdefault(run.made.line, set()).add(run.options)
    told, path = list[str](), ""
    for own, lines in groupby(ranks, key=lambda line: sorted(ranks[line])):
        words = []
        for line in lines:
            text, here = line_and_code(line, codes[line], MOST_CODE), line.rpartition(":")[0]
            text = text.removeprefix(line_from_here(here)) if here == path else text
            (now, there), *others = [one or ("", "") for one in options.get(line, {None})]
            now = "" if others else now  # on each rank another
            words.append(f"{text} with {now} ({there} in the single process)" if now else text)
            path = here
        told.append(f"on rank {spans(own)} at {', '.join(words)}")
    return ["; and ".join(told)]


def _ranks_by_line(runs: Sequence[Run]) -> dict[str, set[int]]:
    ranks: dict[str, set[int]] = {}
    for run in runs:
        ranks.setdefault(run.made.line, set()).add(run.rank)
    return ranks


def _sent(case: Case, runs: Sequence[Run], rank: int) -> Iterator[str]:
    """Where it goes wrong on another rank, at a single line."""
    lines = known_lines(case)
    first = [run for run in runs if run.first]
    if lines is None or len(first) != 1 or first[0].rank == rank:
        return
    (run,) = first
    found = list(lines.first_forward(run.rank, lambda c: c is run.made))
    if found and not found[0].again and found[0].told:
        yield from in_words(found)


def _back(case: Case) -> RunBetween | None:
    lines = known_lines(case)
    return None if lines is None else RunBetween(lines)
