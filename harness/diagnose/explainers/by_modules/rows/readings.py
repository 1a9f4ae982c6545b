"""What a table of counted micro-batches says was done: each reading gives a kind and a cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from sumgrad.base.outcome import some_of, spans
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of
from sumgrad.diagnose.explainers.of_factors.by_rank import multiplied_between
from sumgrad.diagnose.explainers.of_ledgers.divergent import which_step
from sumgrad.diagnose.own_gradients import given_by_ranks
from torch import Tensor

CLOSE = 1e-5
MOST = 6  # ranks or parts that are written out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One micro-batch. ranks: those that took the same rows in it, as tensor parallel ranks do.

    weights: (rows,) with which factor each row entered.
    """

    ranks: tuple[int, ...]
    number: int
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How often each part is counted in what a rank holds of some parameters."""

    rank: int
    names: tuple[str, ...]
    often: tuple[float, ...]


def own_only(
    case: Case, parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Every rank holds what it made itself, and nothing of others, where there are others."""
    for counted in found:
        if all(counted.rank in part.ranks for part in parts):
            return "", None
        for part, often in zip(parts, counted.often, strict=True):
            if (counted.rank in part.ranks) == (abs(often) < CLOSE):
                return "", None
    kind, cause, _ = which_step(case, names, mixed=False)
    return kind, cause.format(what=some_of(list(names)))


def given_nothing(
    case: Case, parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """What no rank holds was not given by the backward itself: exactly zero, as it comes."""
    given = given_by_ranks(case)
    lost = [part for i, part in enumerate(parts) if all(abs(c.often[i]) < CLOSE for c in found)]
    if not lost or given is None:
        return "", None
    ranks: dict[int, list[int]] = {}
    for part in lost:
        for rank in part.ranks:
            passes = sum(rank in other.ranks for other in parts)
            own = [given[rank][0].get(name) for name in names]
            if any(o is None or len(o) != passes or bool(o[part.number].any()) for o in own):
                return "", None
            ranks.setdefault(rank, []).append(part.number)
    where = ", ".join(f"rank {r} in micro-batch {spans(n)}" for r, n in sorted(ranks.items()))
    return "lost_rows", (
        f"what the backward gives {some_of(list(names))} is zero on {where}, though the modules "
        f"have a gradient there: look at what it is multiplied with, and at hooks on these "
        f"parameters"
    )


def late(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Of others some micro-batches are there and the rest not: those were added after it."""
    late: set[int] = set()
    early: set[int] = set()
    for counted in found:
        for part, often in zip(parts, counted.often, strict=True):
            if counted.rank in part.ranks:
                if abs(often) < CLOSE:
                    return "", None
                continue
            (late if abs(often) < CLOSE else early).add(part.number)
    if late & early:
        return _late_of_each(parts, found, names)
    if not late or not early:
        return "", None
    how = "after" if min(late) > min(early) else "outside"
    return "late_gradient", (
        f"{some_of(list(names))} is reduced too early: micro-batch {spans(sorted(late))} is added "
        f"{how} its reduction and stays on its own rank, micro-batch {spans(sorted(early))} is "
        f"reduced"
    )


def _late_of_each(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """The same where ranks have unequally many: of each rank its last ones."""
    late: dict[int, set[int]] = {}
    early: dict[int, set[int]] = {}
    for counted in found:
        for part, often in zip(parts, counted.often, strict=True):
            if counted.rank not in part.ranks:
                held = late if abs(often) < CLOSE else early
                for rank in part.ranks:
                    held.setdefault(rank, set()).add(part.number)
    if late.keys() != early.keys() or any(min(late[r]) <= max(early[r]) for r in late):
        return "", None
    shown = "; ".join(f"{spans(sorted(late[rank]))} of rank {rank}" for rank in sorted(late))
    return "late_gradient", (
        f"{some_of(list(names))} is reduced too early: micro-batch {shown} is added after its "
        f"reduction and stays on its own rank, those before are reduced"
    )


def lost_everywhere(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Some micro-batches of some ranks are on no rank, not on those that made them either, and the
    others are on all: no group of a reduction explains that."""
    common = _common_weight(parts)
    lost = [abs(often) < CLOSE for often in found[0].often]
    for counted in found:
        times = [often * common for often in counted.often]
        if any(abs(t) >= CLOSE if gone else abs(t - 1) >= CLOSE
               for t, gone in zip(times, lost, strict=True)):  # fmt: skip
            return "", None
    gone = [part for part, is_lost in zip(parts, lost, strict=True) if is_lost]
    there = [part for part, is_lost in zip(parts, lost, strict=True) if not is_lost]
    holders = {counted.rank for counted in found}
    if not gone or any(not holders & {*part.ranks} for part in gone):
        return "", None
    numbers, makers = {part.number for part in there}, {part.ranks for part in there}
    if any(part.number not in numbers or part.ranks not in makers for part in gone):
        return "", None  # all of that number, or all of that rank: said by those
    told = ", ".join(f"rank {spans(list(part.ranks))} in micro-batch {part.number}"
                     for part in gone[:MOST])  # fmt: skip
    more = f" and {len(gone) - MOST} more" if len(gone) > MOST else ""
    return "lost_rows", (
        f"what was made on {told}{more} is not in {some_of(list(names))}, on no rank, its own "
        f"neither, and all else is: look at what adds up a rank's own, and at what a reduction "
        f"that replaces it leaves out"
    )


def by_group(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Every micro-batch is there once, from the ranks of a group that is not the same for all."""
    groups: dict[int, set[tuple[int, ...]]] = {}
    common = _common_weight(parts)
    made: dict[int, set[int]] = {}
    for part in parts:
        made.setdefault(part.number, set()).update(part.ranks)
    differ = False
    for counted in found:
        there: dict[int, list[int]] = {}
        for part, often in zip(parts, counted.often, strict=True):
            if min(abs(often * common), abs(often * common - 1)) > CLOSE:
                return "", None
            there.setdefault(part.number, []).extend(part.ranks if abs(often) > CLOSE else ())
        every = {rank for ranks in there.values() for rank in ranks}
        for number, ranks in there.items():
            groups.setdefault(number, set()).add(tuple(sorted(ranks)))
            differ |= {*ranks} != every & made[number]
    numbers: dict[str, list[int]] = {}
    for number, sets in groups.items():
        shown = " and over ".join(f"rank {spans(list(ranks))}" for ranks in sorted(sets) if ranks)
        numbers.setdefault(shown, []).append(number)
    if len(numbers) < 2 or "" in numbers or not differ:  # some ranks have fewer micro-batches
        return "", None
    told = [f"micro-batch {spans(sorted(n))} over {where}" for where, n in numbers.items()]
    text = f"{some_of(list(names))} is not reduced over the same ranks each time"
    return "late_gradient", f"{text}: {'; '.join(told)}"


def by_number(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Every rank holds every rank's micro-batches, each number so often."""
    often: dict[int, float] = {}
    common = _common_weight(parts)
    for counted in found:
        for part, value in zip(parts, (v * common for v in counted.often), strict=True):
            known = often.setdefault(part.number, value)
            if abs(known - value) > CLOSE * max(1.0, abs(known)):
                return "", None
    values = [often[number] for number in sorted(often)]
    if len(values) < 2 or max(values) - min(values) < CLOSE:
        return "", None
    shown = ", ".join(f"{n}: {_number(often[n])}" for n in sorted(often))
    lost = [n for n, value in often.items() if abs(value) < CLOSE]
    kept = {round(v, 5) for n, v in often.items() if n not in lost}
    if lost and len(kept) == 1:
        what = some_of(list(names))
        return "lost_rows", f"micro-batch {spans(sorted(lost))} is not in the gradient of {what}"
    ratios = {round(b / a, 5) for a, b in pairwise(values) if a}
    if len(values) > 2 and len(ratios) == 1 and not lost:
        text = "each call rescales what was there before"
        if abs(values[0] - 1) < CLOSE:
            text = (f"each is multiplied by {_number(ratios.pop())} once more than the one before "
                    f"it, as by a hook or a factor that is there once more each time")  # fmt: skip
        return "rescaled", f"micro-batches are counted {shown} in {some_of(list(names))}: {text}"
    if _are_counted_again(values):
        text = "what was there before is counted again with a later one"
        return (
            "counted_again",
            f"micro-batches are counted {shown} in {some_of(list(names))}: {text}",
        )
    return "row_factors", (
        f"micro-batches are counted {shown} in {some_of(list(names))}, as if what was added up "
        f"was multiplied by {multiplied_between(values, 'micro-batch')}: look for a clip, a "
        f"division or a reduction of .grad there"
    )


def _are_counted_again(values: Sequence[float]) -> bool:
    """Whether each is there so often, in whole numbers, as the last and none less than what comes
    after it: a mean that runs weighs the first the more, too, and counts nothing again."""
    last = values[-1]
    return (
        values == sorted(values, reverse=True)
        and bool(last)
        and all(map(math.isfinite, values))
        and all(abs(v / last - round(v / last)) < CLOSE for v in values)
    )


def some_ranks(
    parts: Sequence[Part], found: Sequence[Counted], names: Sequence[str]
) -> tuple[str, str | None]:
    """Each rank holds the parts of some ranks and none of others."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for counted in found:
        there: dict[tuple[int, ...], set[bool]] = {}
        for part, often in zip(parts, counted.often, strict=True):
            there.setdefault(part.ranks, set()).add(abs(often) >= CLOSE)
        if any(len(states) > 1 for states in there.values()):
            return "", None
        inside = sorted(r for ranks, states in there.items() if True in states for r in ranks)
        groups.setdefault(tuple(inside), []).append(counted.rank)
    everybody = {r for part in parts for r in part.ranks}
    if any(set(inside) == everybody or not inside for inside in groups):
        return "", None
    most = max(abs(n) for counted in found for n in counted.often) * _common_weight(parts)
    repeated = f", {_number(most)} times" if abs(most - 1) > CLOSE else ""
    if len(groups) == 1:
        lost = sorted(everybody - set(next(iter(groups))))
        text = f"what rank {spans(lost)} made is not in {some_of(list(names))}, on any rank"
        return "lost_contribution", text + (
            f"; the rest is, {_number(most)} times" * bool(repeated)
        )
    shown = "; ".join(
        f"rank {spans(ranks)} holds what rank {spans(list(inside))} made{repeated}"
        for inside, ranks in list(groups.items())[:4]
    )
    return "too_few_ranks", f"{some_of(list(names))} is reduced over too few ranks: {shown}"


def shown(parts: Sequence[Part], counted: Counted) -> str:
    """`rank 0, rank 1-2 micro-batch 0: 1/3 times; rank 1-2 micro-batch 1: 1 times`."""
    every: dict[tuple[int, ...], set[int]] = {}
    by_value: dict[str, dict[tuple[int, ...], set[int]]] = {}
    common = _common_weight(parts)
    for part, often in zip(parts, counted.often, strict=True):
        every.setdefault(part.ranks, set()).add(part.number)
        held = by_value.setdefault(_number(often * common), {})
        held.setdefault(part.ranks, set()).add(part.number)
    told = []
    for value, held in by_value.items():
        whose: dict[str, list[int]] = {}
        for ranks, numbers in held.items():
            whole = numbers == every[ranks]
            which = "" if whole else f" micro-batch {spans(sorted(numbers))}"
            whose.setdefault(which, []).extend(ranks)
        labels = [f"rank {spans(sorted(ranks))}{which}" for which, ranks in whose.items()]
        more = " ..." if len(labels) > MOST else ""
        told.append(f"{', '.join(labels[:MOST])}{more}: {value} times")
    return "; ".join(told)


def _common_weight(parts: Sequence[Part]) -> float:
    """The factor of every row of every part, if it is one."""
    weights = torch.cat([part.weights[part.weights != 0] for part in parts])
    one = bool(len(weights)) and bool((weights - weights[0]).abs().max() < CLOSE)
    return float(weights[0]) if one else 1.0


def _number(value: float) -> str:
    return "0" if abs(value) < CLOSE else fraction_of(value)
