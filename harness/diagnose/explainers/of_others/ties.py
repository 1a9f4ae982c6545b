"""Parameters that are one in build() and several on a rank."""

from __future__ import annotations

from collections.abc import Iterator

from sumgrad.base.outcome import some_of
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.of_factors.factors import explained
from sumgrad.diagnose.explanation import Explanation, Left


def tie_that_was_cut(case: Case, left: Left) -> Iterator[Explanation]:
    """Only tied parameters are wrong, and distribute() has made several of them."""
    failing = {cell.name for cell in case.failing_cells}
    cut = {
        names: tuple(rank for rank, held in case.record.ranks.items() if names in held.untied)
        for held in case.record.ranks.values()
        for names in held.untied
    }
    guilty = {names: ranks for names, ranks in cut.items() if failing & set(names)}
    if not guilty or failing - {name for names in guilty for name in names}:
        return
    names, ranks = next(iter(guilty.items()))
    yield explained(
        case,
        Diagnosis(
            cause=f"{' and '.join(names)} are one parameter in build() and {len(names)} after "
            f"distribute(): the tie is cut, and unless the step adds them up, each has the "
            f"gradient of its own use",
            kind="untied",
            ranks=ranks,
            because=(f"only {some_of(sorted(failing))} is wrong",),
        ),
    )
