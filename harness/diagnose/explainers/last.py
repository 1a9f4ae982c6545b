"""What is said where no factor and no ledger explains a case: what differs each time, and open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from sumgrad.base.outcome import in_digits, some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case, fails
from sumgrad.diagnose.explainers.by_modules.backwards.hooks import lines_of_hooks
from sumgrad.diagnose.explainers.by_modules.rows.put_together import put_together
from sumgrad.diagnose.explainers.of_factors.by_rank import (
    on_which_side_of_the_reduction,
    put_together_by_rank,
)
from sumgrad.diagnose.explainers.of_factors.factors import explained, fitted
from sumgrad.diagnose.explainers.of_ledgers.ledger import something_else_goes_in
from sumgrad.diagnose.explanation import NOT_PROVED, Explanation, Left
from sumgrad.diagnose.outright import run_to_run
from sumgrad.judge.cells import Cell, cells

MOST_NUMBERS = 6  # that are written out
FEWEST = 8  # different numbers that all have few digits
ROUNDINGS = 8  # of the largest number, in bfloat16: what is off by more has another cause


def unlike_each_time(case: Case, left: Left) -> Iterator[Explanation]:
    """The repeated step missed the reference by something else than the first, and what the first
    one's ranks gave, put together otherwise, is not all of it."""
    fails_again = any(diff.status == "fail" for diff in case.again)
    if case.has_plan or fitted(case) is not None or not fails_again or not _differs(case):
        return
    found = run_to_run(case.again)
    for one in (*put_together(case, left), *put_together_by_rank(case, left)):
        if one.diagnosis.standing == "proved":  # of the first run alone, and that is enough
            told = one.diagnosis
            yield replace(one, diagnosis=replace(told, however=(*told.however, found.cause)))
            return
    odd = something_else_goes_in(case)
    yield explained(case, replace(found, because=(*found.because, *_draws(case), *odd)))


def _draws(case: Case) -> list[str]:
    """Where random numbers are drawn while the step runs, in its backward and its hooks, too."""
    ranks: dict[str, set[int]] = {}
    for rank, held in case.record.ranks.items():
        for (tier, _), info in held.info.items():
            drawn = info.get("drawn")
            for place in drawn if tier == case.tier and isinstance(drawn, dict) else ():
                ranks.setdefault(place, set()).add(rank)
    shown = [f"{place} on rank {spans(sorted(on))}" for place, on in sorted(ranks.items())]
    return [f"random numbers are drawn in it at {some_of(shown)}"] if shown else []


def low_digits(case: Case, left: Left) -> Iterator[Explanation]:
    """Every wrong gradient is made of bfloat16 numbers, and off by their rounding, of a step that
    has more digits."""
    cells = case.failing_cells
    if case.record.spec.tiers.get(case.tier) == "bfloat16":
        return
    if not case.has_plan and _are_many(cells) and all(_is_narrow(cell) for cell in cells):
        yield explained(
            case,
            Diagnosis(
                cause=f"{some_of(_names(case))} has only bfloat16 digits",
                kind="low_precision",
                because=("every element of it is a bfloat16 number",),
                however=_right(case),
            ),
        )


def open_end(case: Case, left: Left) -> Iterator[Explanation]:
    """Nothing is proved: where to look."""
    failing = case.failing_cells
    place = on_which_side_of_the_reduction(case)
    worst = max(failing, key=lambda c: float((c.measured - c.wanted.value).abs().max()) / _of(c))
    yield explained(
        case,
        Diagnosis(
            cause=f"open: {some_of(_names(case))} is wrong{NOT_PROVED}; the largest error "
            f"is in {worst.name} on rank {worst.rank}",
            kind="open",
            standing="open",
            ranks=tuple(sorted({c.rank for c in failing})),
            because=(
                _numbers(failing)
                or "one factor on everything, on a parameter, on a term or on stretches of rows "
                "does not leave a residual under the threshold",
                *([place] if place else []),
                *lines_of_hooks(case),
            ),
            however=_right(case),
        ),
    )


def _numbers(failing: Sequence[Cell]) -> str | None:
    """Single numbers, by what they are off: any one factor fits one of them."""
    if any(cell.measured.numel() != 1 for cell in failing):
        return None
    shown = [
        f"{cell.name} on rank {cell.rank} is "
        f"{in_digits(float(cell.measured) / float(cell.wanted.value))} times what it should be"
        for cell in failing[:MOST_NUMBERS]
        if float(cell.wanted.value)
    ]
    return "each is a single number, of which any factor is possible: " + "; ".join(shown)


def _names(case: Case) -> list[str]:
    return list(dict.fromkeys(cell.name for cell in case.failing_cells))


def _right(case: Case) -> tuple[str, ...]:
    wrong = {diff.name for diff in case.diffs if not diff.is_within}  # of any step
    right = [n for n in case.record.spec.params if n not in wrong and n not in _names(case)]
    return (f"{some_of(right)} is right on every rank",) if right else ()


def _differs(case: Case) -> bool:
    """Whether the repeated step gave something else than the first, by more than a threshold.

    Other bits alone tell nothing: DDP puts its buckets together anew after the first step.
    """
    if not case.again:  # it is not asked for
        return False
    record = case.record
    tier = next((held.again_tier for held in record.ranks.values() if held.again), "")
    references = record.references.get(tier, [])
    for cell in cells(record, tier, references[-1]) if references else ():
        again = record.ranks[cell.rank].again.get(cell.name)
        if again is None or cell.got is None or again.shape != cell.got.shape:
            continue
        apart = again.double() - cell.measured
        if bool(torch.isfinite(apart).all()) and fails(cell, apart, factor=2):
            return True
    return False


def _of(cell: Cell) -> float:
    return cell.wanted.size or 1.0


def _are_many(cells: Sequence[Cell]) -> bool:
    """Whether there are numbers enough: a few are bfloat16's by luck, as a half and a third of
    something are."""
    return len({abs(x) for cell in cells for x in cell.measured.reshape(-1)[:FEWEST].tolist()}) >= (
        FEWEST
    )


def _is_narrow(cell: Cell) -> bool:
    value = cell.measured
    if not torch.equal(value.to(torch.bfloat16).double(), value) or not bool(value.any()):
        return False
    off = float((value - cell.wanted.value).abs().max())
    return off <= ROUNDINGS * torch.finfo(torch.bfloat16).eps * float(value.abs().max())
