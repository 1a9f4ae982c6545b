"""The kill matrix as data: one Cell for each topology, workload and fault; counts and summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from sumgrad.base.verdict import Status

GOOD = ("killed", "law", "invisible", "clean", "died", "allowed")
UNTOLD = ("unknown", "unattacked")  # of a clean step
WORST_FIRST = ("missed", "alarm", "crashed", "hung", "mispredicted", "misnamed", *UNTOLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. fault: None for the clean one. by: comparison or ledger, where killed.

    result: clean, killed, law (the ledger alone shows it), invisible, died; or, and then the matrix
    fails: missed, alarm, crashed, hung, mispredicted; misnamed is listed, and does not fail.
    allowed: missed, and the caller says that it need not be noticed. Of a clean step, where the
    matrix is UNKNOWN: unknown, as its own verdict; unattacked: none of its collectives was.
    died: the ranks ended badly of what a collective did wrong; counted apart, as no kill of the
    comparison. named_alone: whether the cause is named right without a clean run beside it.

    predicted: a planned fault's worst error of its own prediction, of the threshold. kind: of the
    cause that was named.
    """

    topology: str
    workload: str
    fault: str | None
    result: str
    cause: str | None = None
    kind: str | None = None
    by: str | None = None
    predicted: float | None = None
    named_alone: bool | None = None

    @property
    def ok(self) -> bool:
        return self.result in GOOD


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All cells, in the order they ran. unused: what was allowed and matched nothing missed."""

    cells: tuple[Cell, ...]
    unused: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        """Whether every visible fault was killed and every clean run passed, as the exit says.

        A cause with another name is listed and counted; that the fault was killed stands.
        """
        bad = [cell.result for cell in self.cells if not cell.ok and cell.result != "misnamed"]
        if not self.cells or not {*bad} <= {*UNTOLD}:
            return "fail"
        return "unknown" if bad else "pass"

    @property
    def ok(self) -> bool:
        return self.status == "pass"

    @property
    def counts(self) -> dict[str, int]:
        """Result -> how many."""
        return count(cell.result for cell in self.cells)

    @property
    def share_named(self) -> float | None:
        """Of the faults that the comparison or the ledger killed, those named correctly."""
        kills = [c for c in self.cells if c.result in ("killed", "law", "misnamed")]
        return sum(c.result != "misnamed" for c in kills) / len(kills) if kills else None

    @property
    def share_named_alone(self) -> float | None:
        """The same where the diagnosis has only the failed run, as on a user's machine."""
        kills = [c.named_alone for c in self.cells if c.named_alone is not None]
        return sum(kills) / len(kills) if kills else None

    def bad(self) -> list[Cell]:
        """What fails the matrix, worst first."""
        found = [cell for cell in self.cells if not cell.ok]
        return sorted(found, key=lambda cell: WORST_FIRST.index(cell.result))

    def summary(self) -> str:
        """One line with the counts."""
        text = ", ".join(f"{n} {result}" for result, n in sorted(self.counts.items()))
        named = f"; {self.share_named:.1%} of kills named" if self.share_named is not None else ""
        if self.share_named_alone is not None:
            named += f" ({self.share_named_alone:.1%} without a clean run beside)"
        return f"{self.status.upper()}: {text}{named}"

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "ok": self.ok,
            "status": self.status,
            "counts": self.counts,
            "share_named": self.share_named,
            "share_named_alone": self.share_named_alone,
            "cells": [asdict(cell) for cell in self.cells],
        }


def allowing(matrix: Matrix, patterns: Sequence[str]) -> Matrix:
    """With what was missed set aside where it need not be noticed, as of a number that is logged.

    patterns: of faults' names as they are listed, `*` and `?` as in a shell.
    """
    used = {
        pattern: [c for c in matrix.cells if c.result == "missed" and c.fault is not None
                  and fnmatchcase(c.fault, pattern)]
        for pattern in patterns
    }  # fmt: skip
    allowed = {id(cell) for cells in used.values() for cell in cells}
    return Matrix(
        cells=tuple(replace(c, result="allowed") if id(c) in allowed else c for c in matrix.cells),
        unused=tuple(pattern for pattern, cells in used.items() if not cells),
    )


def count(results: Iterable[str]) -> dict[str, int]:
    out: dict[str, int] = {}
    for result in results:
        out[result] = out.get(result, 0) + 1
    return out
