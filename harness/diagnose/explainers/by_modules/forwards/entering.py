"""What goes into the first wrong module: whether it is right, and on which ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.between import is_in
from sumgrad.diagnose.explainers.by_modules.looked import gone_into, looked
from sumgrad.diagnose.modules.values.seen import Seen, State
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong

VECTOR_BY_VECTOR = ("Linear", "LayerNorm", "RMSNorm")  # torch's own


def into_the_calls(case: Case, found: FirstWrong) -> list[Seen]:
    """What went into the calls whose outputs are wrong."""
    calls = {(s.rank, s.call.number): s for s in found.seen}
    into = [s for s in gone_into(case, found.wrong) if (s.rank, s.call.number) in calls]
    look = looked(case) if any(s.where is not None for s in into) else None
    if look is None or look.sources.get(found.wrong) not in VECTOR_BY_VECTOR:
        return into
    return [_no_padding(s, calls[s.rank, s.call.number]) for s in into]


def _no_padding(s: Seen, out: Seen) -> Seen:
    """With zeros as wrong of which a wrong vector is made: they are not there for nothing."""
    if (
        s.forward != "right"
        or s.where is None
        or out.wrong is None
        or s.shape[:-1] != out.shape[:-1]
    ):
        return s
    zeros = s.where.picked[s.where.empty & ~s.where.found.any(1)]
    odd = zeros[torch.isin(zeros, out.wrong)]
    return replace(s, forward="wrong", backward="untold", wrong=odd) if len(odd) else s


def what_goes_into(case: Case, found: FirstWrong) -> State:
    """Of the calls whose outputs are wrong, on their ranks."""
    calls = {(s.rank, s.call.number) for s in found.seen}
    into = into_the_calls(case, found)
    if any(s.forward == "wrong" for s in into):
        return "wrong"
    told = {(s.rank, s.call.number) for s in into if s.forward == "right"}
    return "right" if told == calls and all(s.forward == "right" for s in into) else "untold"


def entered_wrong(case: Case, found: FirstWrong) -> tuple[Seen, ...]:
    """What is wrong already as it goes in, of the calls whose outputs are: what a module issues
    itself comes after it."""
    return tuple(s for s in into_the_calls(case, found) if s.forward == "wrong")


def where_it_enters_wrong(case: Case, found: FirstWrong) -> tuple[FirstWrong, list[int]]:
    """The same of those ranks alone where what goes into it is wrong already, if some are; and the
    ranks where it is right: what such a rank gives may be its part of a sum."""
    into = into_the_calls(case, found)
    wrong = {s.rank for s in into if s.forward == "wrong"}
    first = _first_calls(found)
    if wrong and len(first.seen) < len(found.seen) and _enters_right(case, first):
        return first, []  # the calls after these take what comes of it
    if wrong:  # what runs inside of it comes later
        found = replace(found, beside=tuple(m for m in found.beside if not is_in(m, found.wrong)))
    right = {*found.ranks} - wrong
    if (
        not wrong
        or not right
        or any(s.forward != "right" or not s.in_order for s in into if s.rank in right)
    ):
        return found, []
    return replace(found, seen=tuple(s for s in found.seen if s.rank in wrong)), sorted(right)


def _first_calls(found: FirstWrong) -> FirstWrong:
    """The same of the first wrong call of each rank alone."""
    first: dict[int, int] = {}
    for s in found.seen:
        first[s.rank] = min(first.get(s.rank, s.call.number), s.call.number)
    return replace(found, seen=tuple(s for s in found.seen if s.call.number == first[s.rank]))


def _enters_right(case: Case, found: FirstWrong) -> bool:
    """Whether all that goes into these calls is right, and stands as in the single process."""
    into = into_the_calls(case, found)
    told = {s.rank for s in into} == {s.rank for s in found.seen}
    return told and all(s.forward == "right" and s.in_order for s in into)
