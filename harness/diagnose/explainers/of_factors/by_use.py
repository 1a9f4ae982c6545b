"""A parameter of which one use is counted wrongly, and another is right, in words."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, line_and_code
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.diagnose.modules.autograd.by_use import ByUse, Counted, counted_by_use
from sumgrad.diagnose.own_gradients import ALIKE, columns_of, given_by_ranks, weights_of

MOST_MORE = 2  # parameters whose uses are counted otherwise, that are shown


def counted_by_uses(case: Case, left: Left) -> Iterator[Explanation]:
    """Of wrong parameters those whose uses tell it."""
    traces = case.traces
    if traces is None or not case.exact or not any(t.uses for t in traces.ranks.values()):
        return
    scale = _scale(case)
    held = [counted_by_use(cell, traces.ranks, scale) for cell in case.failing_cells]
    found = [one for one in held if one is not None]
    wrong = {(cell.name, cell.rank) for cell in case.failing_cells}
    told = {(one.name, one.rank) for one in found}
    if not found or 2 * len(told) < len(wrong):
        return
    by_name = {one.name: one for one in reversed(found)}
    first, *more = reversed(by_name.values())
    others = sorted({name for name, rank in wrong - told})
    like = [one.name for one in more if _often(one) == _often(first)]
    too = f"; so it is in {some_of(like)}" if like else ""
    unlike = [f"in {one.name} {_in_words(one)}" for one in more if one.name not in like]
    yield explained(
        case,
        Diagnosis(
            cause=f"{first.name} is used in several places, and {_in_words(first)}{too}",
            kind="counted_by_use",
            standing="proved" if all(one.is_fit for one in found) and not others else "likely",
            ranks=tuple(sorted({one.rank for one in found})),
            because=(*_because(first), *unlike[:MOST_MORE]),
        ),
        others,
    )


def _scale(case: Case) -> float | None:
    """How often the sum of what all ranks gave is what it must be, in parameters that are right."""
    given, wrong = given_by_ranks(case), {cell.name for cell in case.failing_cells}
    if given is None:
        return None
    for cell in case.cells:
        columns = None if cell.name in wrong else columns_of(cell, given, uneven=True)
        if columns is None:
            continue
        ranks = sum(len(source) for source in columns.sources)
        weights = weights_of([columns], zeros=True)
        if weights.wanted is None or not weights.only:
            continue
        by_source = weights.wanted.reshape(len(columns.sources), -1)
        often = [float(w[0]) / len(s) for w, s in zip(by_source, columns.sources, strict=True)]
        alike = all(abs(x - often[0]) <= ALIKE * abs(often[0]) for x in often)
        if alike and ranks == len(case.traces.ranks if case.traces else ()):
            return often[0]
    return None


def _often(one: ByUse) -> dict[tuple[str, str], float | None]:
    """By line, to three digits."""
    return {(c.use.line, c.use.function): c.times and round(c.times, 3) for c in one.counted}


def _in_words(one: ByUse) -> str:
    return "; ".join(
        f"what comes through {line_and_code(c.use.line, c.use.code)} ({c.use.function}) {_times(c)}"
        for c in sorted(one.counted, key=lambda c: c.times == 1)
    )


def _times(one: Counted) -> str:
    if one.times is None:
        return "should not be in its gradient, and is"
    if one.times == 1:
        return "is counted as it should be"
    if not one.times:
        return "is not in its gradient at all"
    return f"is counted {fraction_of(one.times)} times as often as it should be"


def _because(one: ByUse) -> Iterator[str]:
    for c in one.counted:
        if c.times == 1:
            continue
        same = "all the same" if c.alike else "not all the same"
        line = c.use.line.rpartition("/")[2]
        text = f"what rank {spans(list(one.ranks))} get through {line} is {same}"
        if c.alike and c.times is not None and abs(c.times - len(one.ranks)) < ALIKE:
            text += ": each has the whole of it, and their sum counts it once for every rank"
        yield text
    how = "fitted to" if one.is_fit else "the only simple weights that give"
    yield (f"the weights of what each use gave, summed over ranks, are {how} what rank {one.rank} "
           f"has and what it must have")  # fmt: skip
