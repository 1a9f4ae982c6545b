"""What one parameter's gradient has too much is what another's lacks: it was given to the wrong."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.outcome import spans
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left
from sumgrad.judge.cells import Cell

FEWEST = 8  # elements, so that no two gradients are apart by the same by chance
SHOWN = 3


def given_to_others(case: Case, left: Left) -> Iterator[Explanation]:
    """Pairs of parameters of one shape whose gradients are off by the same, with opposite signs."""
    if case.has_plan or not case.exact:
        return
    pairs: dict[tuple[str, str], list[int]] = {}
    for more, less in _pairs(case):
        pairs.setdefault((more.name, less.name), []).append(more.rank)
    if not pairs:
        if added := _added(case):
            yield explained(case, added)
        return
    told = {name for pair in pairs for name in pair}
    others = list(dict.fromkeys(c.name for c in case.failing_cells if c.name not in told))
    shown = "; ".join(f"{more} has what {less} lacks" for more, less in list(pairs)[:SHOWN])
    rest = f"; and so {len(pairs) - SHOWN} more pairs" if len(pairs) > SHOWN else ""
    ranks = tuple(sorted({rank for held in pairs.values() for rank in held}))
    yield explained(
        case,
        Diagnosis(
            cause=f"gradients were given to other parameters: {shown}{rest}, on rank "
            f"{spans(ranks)}",
            kind="given_to_others",
            standing="likely" if others else "proved",
            ranks=ranks,
            because=(
                "element by element, what the one has too much is what the other lacks, within the "
                "threshold",
                "look at what pairs gradients with parameters: a zip of two lists of which one is "
                "filtered (of None, say), an order, a name",
            ),
        ),
        others,
    )


def _added(case: Case) -> Diagnosis | None:
    """Where every wrong gradient is its own and all of one other parameter's."""
    of = {(c.rank, c.name): _what_it_has_too(case, c) for c in case.failing_cells}
    if not of or None in of.values():
        return None
    by_name = {name: other for (_, name), other in of.items()}
    if any(other != by_name[name] for (_, name), other in of.items()):
        return None
    shown = "; ".join(
        f"{name} has that of {other}" for name, other in list(by_name.items())[:SHOWN]
    )
    rest = f"; and so {len(by_name) - SHOWN} more" if len(by_name) > SHOWN else ""
    ranks = tuple(sorted({rank for rank, _ in of}))
    return Diagnosis(
        cause=f"gradients of two parameters were added up: besides its own gradient {shown}{rest}, "
        f"on rank {spans(ranks)}",
        kind="given_to_others",
        standing="proved",
        ranks=ranks,
        because=(
            "element by element, what each has too much is the other's right gradient, within the "
            "threshold",
            "look at what collects gradients by a name or a number: two parameters under one key",
        ),
    )


def _what_it_has_too(case: Case, cell: Cell) -> str | None:
    """The one other parameter whose right gradient it has besides its own."""
    if cell.measured.numel() < FEWEST:
        return None
    more = (cell.measured - cell.wanted.value).reshape(-1)
    found = [
        c.name
        for c in case.cells
        if c.rank == cell.rank
        and c.name != cell.name
        and c.wanted.value.numel() == len(more)
        and float(c.wanted.value.norm()) > c.wanted.threshold
        and float((more - c.wanted.value.reshape(-1)).abs().max())
        <= cell.wanted.threshold + c.wanted.threshold
    ]
    return found[0] if len(found) == 1 else None


def _pairs(case: Case) -> Iterator[tuple[Cell, Cell]]:
    """(more, less) of each rank, each cell in one pair."""
    for rank in sorted({c.rank for c in case.failing_cells}):
        mine = [c for c in case.failing_cells if c.rank == rank and c.measured.numel() >= FEWEST]
        left = list(mine)
        for cell in mine:
            if cell not in left:
                continue
            other = next((o for o in left if o is not cell and _opposite(cell, o)), None)
            if other is not None:
                left = [o for o in left if o is not cell and o is not other]
                yield (other, cell) if _size(cell) < _size(other) else (cell, other)


def _opposite(a: Cell, b: Cell) -> bool:
    if a.measured.numel() != b.measured.numel():
        return False
    off = (a.measured - a.wanted.value).reshape(-1) + (b.measured - b.wanted.value).reshape(-1)
    return float(off.abs().max()) <= a.wanted.threshold + b.wanted.threshold


def _size(cell: Cell) -> float:
    return float(cell.measured.norm())
