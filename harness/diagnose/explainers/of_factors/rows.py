"""One factor for each stretch of rows, in words: means of parts, lost rows, one rank's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sumgrad.base.outcome import some_of, spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.looked import fraction_of, rows_of_micro_batches
from sumgrad.diagnose.modules.inputs.rows_read import rows_read
from sumgrad.diagnose.names import (
    axis_groups,
    block_counts,
    factor_symbols,
    list_rows,
    mean_of_means,
)
from sumgrad.diagnose.reductions import CLOSE, empty_handed, scaled_by
from sumgrad.diagnose.row_fit import Factors, Unit

MOST_STRETCHES = 16  # of rows with one factor; more of them are no words


def factor_by_rows(case: Case, found: Factors, names: Sequence[str]) -> Diagnosis:
    """The words for factors on rows; `because` begins with what they leave."""
    what = some_of(names)
    diagnosis = (
        _one_term(case, found, what)
        or _means(case, found, what)
        or _by_micro_batch(case, found, what)
        or _lost_rows(case, found, what)
        or _one_odd_factor(case, found, what)
        or Diagnosis(
            cause=f"the rows are counted differently in {what}: {block_counts(found)}",
            kind="row_factors",
        )
    )
    fits = "with one factor for each row interval the residual is under the threshold"
    return replace(diagnosis, because=(fits, *diagnosis.because))


def _means(case: Case, found: Factors, what: str) -> Diagnosis | None:
    """Every part divided by its own count; the number of parts that are averaged, or none."""
    means = mean_of_means(case, found)
    if means is None:
        return None
    if means == 0:
        return Diagnosis(
            cause=f"{what} is a sum of means: every part is divided by its own count, not by the "
            f"global one",
            kind="local_count",
            standing="proved",
            symbol="N/n_part",
            because=("each part's factor times its count is the total count", *_parts(case, found)),
        )
    return Diagnosis(
        cause=f"{what} is a mean of {means} means: every part is divided by its own count, and "
        f"the parts are averaged",
        kind="mean_of_means",
        standing="proved",
        symbol="N/(parts*n_part)",
        because=(
            "each part's factor times its count is the same number, total count / parts",
            *_parts(case, found),
        ),
    )


def _parts(case: Case, found: Factors) -> list[str]:
    """Which rows the parts have, and whose these are, where every part is that of whole ranks."""
    by_factor: list[tuple[float, set[int]]] = []
    for unit, value in zip(found.units, found.values, strict=True):
        rows = set(range(*(unit.rows or (0, 0))))
        alike = [own for factor, own in by_factor if value is not None
                 and abs(factor - value) < CLOSE]  # fmt: skip
        if alike:
            alike[0].update(rows)
        elif value is not None:
            by_factor.append((value, rows))
    if not 1 < len(by_factor) <= MOST_STRETCHES:
        return []
    shown = [f"rows {spans(sorted(rows))} {fraction_of(value)} times" for value, rows in by_factor]
    out = [f"so count {', '.join(shown)}"]
    told = set().union(*(rows for _, rows in by_factor))
    mine = {rank: set(rows) & told for rank, rows in (_rows_of_ranks(case) or {}).items()}
    read = {rank: rows for rank, rows in mine.items() if rows}
    whose = [tuple(sorted(r for r, own in read.items() if own <= rows)) for _, rows in by_factor]
    if not read or sorted(r for ranks in whose for r in ranks) != sorted(read):
        return out
    out[0] += f": those of rank {', and of rank '.join(spans(list(ranks)) for ranks in whose)}"
    if any(len(ranks) > 1 for ranks in whose):
        along = [name for name, groups in axis_groups(case) if set(groups) == set(whose)]
        out += [f"each part is that of the ranks along {along[0]}" for _ in along[:1]]
    return out


def _one_term(case: Case, found: Factors, what: str) -> Diagnosis | None:
    """One term has a factor for each stretch of rows, and every other counts once everywhere."""
    by_term: dict[str, list[tuple[Unit, float]]] = {}
    for unit, value in zip(found.units, found.values, strict=True):
        if unit.term is not None and value is not None:
            by_term.setdefault(unit.term, []).append((unit, value))
    odd = [t for t, known in by_term.items() if any(abs(v - 1) > CLOSE for _, v in known)]
    if len(odd) != 1 or len(by_term) < 2 or any(u.rows is None for u, _ in by_term[odd[0]]):
        return None
    stretches: list[tuple[list[int], float]] = []
    for unit, value in by_term[odd[0]]:
        rows = range(*(unit.rows or (0, 0)))
        if stretches and abs(stretches[-1][1] - value) < CLOSE:
            stretches[-1][0].extend(rows)
        else:
            stretches.append((list(rows), value))
    if not 1 < len(stretches) <= MOST_STRETCHES:
        return None
    shown = ", ".join(f"{fraction_of(value)} in rows {spans(rows)}" for rows, value in stretches)
    others = [t for t in by_term if t != odd[0]]
    because = [f"{some_of(others)} is counted once in all rows"]
    sizes = [value * len(rows) for rows, value in stretches]
    if max(sizes) - min(sizes) < CLOSE * abs(max(sizes)):
        whole = sum(len(rows) for rows, _ in stretches)
        by = "its own rows" if abs(sizes[0] - whole) < CLOSE * whole else "a multiple of its own"
        because.append(f"each factor times its number of rows is one number: every stretch is "
                       f"divided by {by}, not by all")  # fmt: skip
    read = {rank: set(rows) for rank, rows in (_rows_of_ranks(case) or {}).items()}
    mine = [[rank for rank, own in read.items() if own == set(rows)] for rows, _ in stretches]
    if all(mine):
        whose = "; ".join(f"rows {spans(rows)} are those of rank {spans(ranks)}"
                          for (rows, _), ranks in zip(stretches, mine, strict=True))  # fmt: skip
        because.append(f"each rank weighs it by a number of its own: {whose}")
    return Diagnosis(
        cause=f"{odd[0]} is counted otherwise in {what}: {shown}",
        kind="term_by_rows",
        term=odd[0],
        standing="proved",
        because=tuple(because),
    )


def _rows_of_ranks(case: Case) -> dict[int, Counter[int]] | None:
    return None if case.traces is None else rows_read(case.traces)


def _by_micro_batch(case: Case, found: Factors, what: str) -> Diagnosis | None:
    """One factor for each micro-batch, the same on every rank."""
    numbers = rows_of_micro_batches(case)
    if numbers is None:
        return None
    often: dict[int, set[float]] = {number: set() for number in numbers}
    for unit, value in zip(found.units, found.values, strict=True):
        if value is None:
            continue
        mine = [n for n, rows in numbers.items() if rows & set(range(*(unit.rows or (0, 0))))]
        if len(mine) != 1:
            return None
        often[mine[0]].add(round(value, 6))
    if any(len(values) > 1 for values in often.values()):
        return None
    told = {number: values.pop() for number, values in often.items() if values}
    if len(set(told.values())) < 2:
        return None
    lost = [number for number, value in told.items() if not value]
    if lost and set(told.values()) == {0.0, 1.0}:
        cause = f"micro-batch {spans(lost)} of every rank is not in the gradient of {what}"
        return Diagnosis(cause=cause, kind="lost_rows", factor="0")
    shown = ", ".join(f"{number}: {fraction_of(value)}" for number, value in told.items())
    cause = f"micro-batches are counted {shown} in {what}, on every rank that has it alike"
    return Diagnosis(
        cause=cause,
        kind="micro_batches",
        standing="proved",
        because=("as when each is divided or scaled by what holds at its time, and not by one "
                 "number for all of them",),
    )  # fmt: skip


def _lost_rows(case: Case, found: Factors, what: str) -> Diagnosis | None:
    """Some rows are not counted and all others once."""
    lost = [u.rows for u in found.counted(0) if u.rows]
    others = [v for v in found.known if abs(v) >= CLOSE]
    if not lost or not all(abs(v - 1) < CLOSE for v in others):
        return None
    empty = empty_handed(case)
    if empty is not None:
        return Diagnosis(
            cause=f"rank {spans(empty[0])} contributes zeros to {empty[1]}; rows "
            f"{list_rows(lost)} are not in the gradient of {what}",
            kind="lost_contribution",
            standing="proved",
            ranks=tuple(empty[0]),
            factor="0",
            because=("the ledger shows its input as zeros while the others' are not",),
        )
    return Diagnosis(
        cause=f"rows {list_rows(lost)} are not in the gradient of {what}",
        kind="lost_rows",
        factor="0",
        because=(
            "their factor is 0 and that of all other rows is 1; rows without a gradient are not "
            "told",
        ),
    )


def _one_odd_factor(case: Case, found: Factors, what: str) -> Diagnosis | None:
    """Some rows have one factor and all others 1."""
    odd = {
        u.rows: v
        for u, v in zip(found.units, found.values, strict=True)
        if v is not None and u.rows and abs(v - 1) > CLOSE
    }
    first = next(iter(odd.values()), None)
    if first is None or not all(abs(v - first) < CLOSE for v in odd.values()):
        return None
    by = scaled_by(case, first)
    where = f", which is what rank {spans(by)} sends" if by else ""
    symbols = factor_symbols(case, first)
    named = f", which equals {symbols[0]}," if symbols else ""
    return Diagnosis(
        cause=f"rows {list_rows(list(odd))} are counted {first:.9g}{named} times in {what}{where}",
        kind="rank_factor",
        ranks=tuple(by),
        factor=f"{first:.9g}",
        symbol=symbols[0] if symbols else None,
        because=("all other rows are counted once",),
    )
