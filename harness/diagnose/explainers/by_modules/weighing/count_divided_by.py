"""One factor on all gradients that a line makes: it divides by another count than the batch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.lines import expression, known_lines
from sumgrad.diagnose.explainers.by_modules.looked import (
    fraction_of,
    line_and_code,
    unless_it_fails,
)
from sumgrad.diagnose.modules.where.loss_weights import same
from sumgrad.record.computed import Computation, Computed

DIVIDES = ("div", "true_divide")


def by_another_count(case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """A common factor, with the line on every rank that makes it, if there is just one."""
    found = _line(case, diagnosis) if diagnosis.kind == "factor" else None
    if found is None:
        return diagnosis
    line, by, count = found
    file_and_code = line.made_at[1]
    made = f"what is made at {line_and_code(*file_and_code)}, " if file_and_code[0] else ""
    begin = diagnosis.cause.partition(", which equals ")[0]
    cause = (
        f"{begin}: {expression(line)} divides by {made}{fraction_of(by)}, which is "
        f"{fraction_of(by / count)} times the count of the full batch, {fraction_of(count)}"
    )
    return replace(diagnosis, cause=cause, kind="wrong_count", standing="likely", symbol=None,
                   also=(), however=())  # fmt: skip


@unless_it_fails
def _line(case: Case, diagnosis: Diagnosis) -> tuple[Computation, float, float] | None:
    lines, factor = known_lines(case), diagnosis.factor
    whole = diagnosis.cause.startswith("every gradient")
    if lines is None or factor is None or not whole:
        return None
    counts = {float(count) for count in case.reference.counts.values()}
    of_ranks = [
        {
            (c.site, by): c
            for c, by in _divisions(lines.computed(rank))
            if not lines.is_run_there(c)
            and any(same([by * float(Fraction(factor)), n]) for n in counts)
        }
        for rank in lines.states.ranks
    ]
    common = {*of_ranks[0]}.intersection(*of_ranks[1:])
    if len(common) != 1:
        return None
    ((site, by),) = common
    (count,) = (n for n in counts if same([by * float(Fraction(factor)), n]))
    return of_ranks[0][site, by], by, count


def _divisions(mine: Computed) -> Iterator[tuple[Computation, float]]:
    """Of a loss, which all gradients pass, by one number of which they pass none."""
    for c in mine.computations:
        if c.function not in DIVIDES or len(c.takes) < 2 or c.function_of:
            continue
        first, by = c.takes[:2]
        if not isinstance(first, int) or first not in mine.with_graph or by in mine.with_graph:
            continue
        if mine.values[first].numel() != 1:
            continue
        if isinstance(by, int):
            if mine.values[by].numel() == 1:
                yield c, float(mine.values[by].item())
        else:
            try:
                yield c, float(by.rpartition("=")[2])
            except ValueError:
                continue
