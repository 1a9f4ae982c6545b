"""In which way a gradient is wrong, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sumgrad.base.outcome import spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import told_of
from sumgrad.diagnose.explainers.by_modules.looked import (
    as_a_hint,
    fraction_of,
    line_and_code,
    traces_looked_at,
)
from sumgrad.diagnose.modules.how_wrong.how_off import HowOff, how_off, what_stands, zeros_off
from sumgrad.diagnose.modules.in_code.lines import AtLine, Lines
from sumgrad.diagnose.modules.in_code.lost_by import line_that_is_zero_with
from sumgrad.diagnose.modules.values.matching import SAME_FACTOR, vectors
from sumgrad.diagnose.modules.values.whole import by_module
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from torch import Tensor

MOST_GROUPS = 4
MOST_MOVED = 4


@as_a_hint
def off_at_a_module(case: Case, found: FirstWrong) -> list[str]:
    """Of the call that is told of."""
    traces = traces_looked_at(case)
    s = told_of(found.seen)
    if traces is None or s.where is None or found.lost or found.over_all:
        return []
    trace = traces.ranks[s.rank]
    gradient = trace.gradient_of(s.call)
    whole = by_module(traces.single, s.call.module.__eq__).get((s.call.module, s.call.part))
    alone = s.where.found.sum(1) == 1
    start, end = s.where.columns
    if gradient is None or whole is None or not bool(alone.any()):
        return []
    got = vectors(gradient)[s.where.picked[alone]]
    wanted = whole.gradients[s.where.found[alone].long().argmax(1), start:end]
    where = f"on rank {s.rank} in call {s.call.number}"
    how, zeros = how_off(got, wanted), _zeros_in_words(got, wanted, where)
    if how is not None and (stands := _stands_in_words(got, wanted, how, where)):
        return stands
    if not zeros or not (how is None or how.wrong):
        return _in_words(how, where)
    c = line_that_is_zero_with(trace.computed, gradient)
    by = [] if c is None else [
        f"what {line_and_code(c.line, c.code)} gives on rank {s.rank} is zero, or "
        f"False, where that gradient is zero, and nowhere else"
    ]  # fmt: skip
    return [*zeros, *by]


@as_a_hint
def off_at_a_line(lines: Lines | None, found: Sequence[AtLine]) -> list[str]:
    """Of the argument that gets what is wrong, of the first rank that tells."""
    for one in found if lines is not None else ():
        for at in one.at:
            number = one.mine.takes[at]
            pair = (
                lines.states.beside(one.rank, number) if lines and isinstance(number, int) else None
            )
            if pair is None:
                continue
            how, where = how_off(*pair), f"on rank {one.rank}"
            if how is not None and not how.wrong:  # which is not so in other calls
                return _in_words(how, where)
            if how is not None and (stands := _stands_in_words(*pair, how, where)):
                return stands
            if zeros := _zeros_in_words(*pair, where):
                return zeros
    return []


def _stands_in_words(got: Tensor, wanted: Tensor, how: HowOff, where: str) -> list[str]:
    stands = what_stands(got, wanted, how)
    if not stands:
        return []
    told = [
        f"{s.column} has nothing"
        if s.of is None
        else f"{s.column} what belongs to {s.of}" + " beside its own" * s.added
        for s in stands
    ]
    more = f" and {len(told) - MOST_MOVED} more" if len(told) > MOST_MOVED else ""
    return [f"for one, {where} some columns have what belongs to others: column "
            f"{', '.join(told[:MOST_MOVED])}{more}; the others are right up to one factor"
           ]  # fmt: skip


def _zeros_in_words(got: Tensor, wanted: Tensor, where: str) -> list[str]:
    zeros = zeros_off(got, wanted)
    if zeros is None:
        return []
    lost = f"{zeros.lost} of {zeros.of} numbers that were compared are zero and should not be"
    more = f"{zeros.surplus} should be zero and are not"
    if zeros.lost and zeros.surplus:
        more = f"{lost}, and {more}"
    elif zeros.lost:
        more = lost
    else:
        more = f"{zeros.surplus} of {zeros.of} numbers that were compared {more.partition(' ')[2]}"
    return [f"for one, {where} {more}; the others are right up to one factor: look at what takes "
            f"or leaves out numbers (a mask, a clamp, an index)"]  # fmt: skip


def _in_words(how: HowOff | None, where: str) -> list[str]:
    if how is None:
        return []
    if how.is_moved:
        moved = [f"{j} what belongs to {k}" for j, k in enumerate(how.columns) if k not in (-1, j)]
        more = f" and {len(moved) - MOST_MOVED} more" if len(moved) > MOST_MOVED else ""
        return [f"for one, {where} its columns are in other places: column "
                f"{', '.join(moved[:MOST_MOVED])}{more}"]  # fmt: skip
    if how.wrong:
        right = [j for j, k in enumerate(how.columns) if k == j]
        return [f"for one, {where} columns {spans(list(how.wrong))} of {len(how.columns)} are "
                f"wrong, and columns {spans(right)} are the single process's up to one factor"
               ]  # fmt: skip
    groups: list[tuple[float, list[int]]] = []
    for j, c in enumerate(how.factors):
        if math.isnan(c):  # of nothing
            continue
        near = next((own for f, own in groups if abs(f - c) <= SAME_FACTOR * max(abs(f), abs(c))),
                    None)  # fmt: skip
        if near is None:
            groups.append((c, [j]))
        else:
            near.append(j)
    if len(groups) > MOST_GROUPS:
        return [f"for one, {where} each of its columns has a factor of its own"]
    shown = ", ".join(f"{fraction_of(c)} in columns {spans(own)}" for c, own in groups)
    return [f"for one, {where} it is the single process's but for factors by columns: {shown}"]
