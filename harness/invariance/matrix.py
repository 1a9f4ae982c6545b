"""`sumgrad ops`: operators x properties on raw bits, with accuracy in a column of its own.

The work is done by ranks (`ops_rank`); here it is started, collected and shown. A matrix passes if
our operators are green, every planted one is red where it must be, and every rank ended well;
torch's controls are reported as they are, and alone they are no verdict.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sumgrad.base.errors import UserError
from sumgrad.base.outcome import RankOutcome, first_to_fail
from sumgrad.base.verdict import EXIT_CODES, Status
from sumgrad.invariance.arrangement import PROPERTIES, RANK_COUNTS
from sumgrad.invariance.bits import Difference, Report, add_cells, error_limit
from sumgrad.invariance.protocol import Operator
from sumgrad.invariance.ranks import LOCAL, NUM_RANKS, Selection, load_operators
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.report.grid import Grid, GridTable, Square

if TYPE_CHECKING:
    import torch

SHIPPED = (
    "sumgrad.workloads.operators.ours:shipped",
    "sumgrad.workloads.operators.planted:planted",
    "sumgrad.workloads.operators.controls:controls",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpsMatrix:
    """Reports by operator, in order. failures: what did not run to its end."""

    dtype: str
    device: str = "cpu"
    reports: tuple[Report, ...]
    failures: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """What must not be, failures first."""
        return [*self.failures, *(line for report in self.reports for line in report.wrong)]

    @property
    def status(self) -> Status:
        """pass, fail, or unknown where nothing was judged."""
        if self.wrong:
            return "fail"
        judged = any(report.expect != "control" for report in self.reports)
        return "pass" if judged else "unknown"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def summary(self) -> str:
        ours = [r for r in self.reports if r.expect == "invariant"]
        planted = [r for r in self.reports if r.expect == "planted"]
        cells = sum(len(r.cells | dict.fromkeys(r.expected)) for r in ours)
        green = sum(d is None for r in ours for d in r.cells.values())
        parts = [f"{green} of {cells} cells of {len(ours)} operators invariant"] if ours else []
        if ours:
            parts.append(f"{sum(bool(r.errors) for r in ours)} of {len(ours)} checked for accuracy")
        if planted:
            caught = sum(not r.wrong for r in planted)
            parts.append(f"{caught} of {len(planted)} planted caught")
        if self.status == "unknown":
            parts.append("only controls, nothing was judged")
        return f"{self.status.upper()}  {', '.join(parts)} ({self.dtype}, {self.device})"

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "dtype": self.dtype,
            "device": self.device,
            "wrong": self.wrong,
            "seconds": self.seconds,
            "versions": self.versions,
            "operators": [
                {
                    "name": report.operator,
                    "expect": report.expect,
                    "errors": report.errors,
                    "cells": [
                        {
                            "tensor": tensor,
                            "property": prop,
                            "status": "same" if difference is None else difference.kind,
                            "difference": difference and asdict(difference),
                        }
                        for (tensor, prop), difference in report.cells.items()
                    ],
                }
                for report in self.reports
            ],
        }


def choose(asked: Sequence[str]) -> tuple[Selection, list[tuple[Operator, str]]]:
    """What --op asks for: sources with names, and the operators with what is expected of them.

    A user's operator must be invariant, whatever it says of itself. Raises UserError.
    """
    names = [name for name in asked if ":" not in name or name.startswith("planted:")]
    files = [name for name in asked if name not in names]
    selection: list[tuple[str, list[str] | None]] = []
    found: list[tuple[Operator, str]] = []
    known: list[str] = []
    for source in SHIPPED if names or not asked else ():
        operators = _load(source)
        known += [operator.name for operator in operators]
        kept = [op for op in operators if not names or op.name in names]
        if kept:
            selection.append((source, [op.name for op in kept]))
            found += [(operator, operator.expect) for operator in kept]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(
            f"--op: no operator {unknown[0]!r}; there are {', '.join(known)}; yours: file.py:NAME"
        )
    for source in files:
        selection.append((source, None))
        found += [(operator, "invariant") for operator in _load(source)]
    everybody = [operator.name for operator, _ in found]
    twice = [name for name in everybody if everybody.count(name) > 1]
    if twice or not found:
        what = f"{twice[0]!r} is the name of two operators" if twice else "there is no operator"
        raise UserError(f"--op {' '.join(asked)}: {what}")
    return selection, found


def _load(source: str) -> list[Operator]:
    try:
        return load_operators(source)
    except (Exception, SystemExit) as error:
        raise UserError(f"--op {source}: {type(error).__name__}: {error}") from error


def run_matrix(
    asked: Sequence[str],
    *,
    dtype: str,
    seed: int,
    timeout_s: float,
    device: str = "cpu",
    launcher: Launcher,
    progress: Callable[[str], None] = lambda _: None,
) -> OpsMatrix:
    """Run on five ranks. asked: operator names and "file.py:NAME"; empty: all. Raises UserError."""
    import torch
    from sumgrad.launch.versions import versions

    started = time.monotonic()
    if seed < 0:
        raise UserError(f"--seed: got {seed}, expected an integer >= 0")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this torch sees no GPU")
    selection, found = choose(asked)
    with launcher.temporary_directory() as directory:
        (directory / "ranks").mkdir()
        job = RankJob(
            target="sumgrad.invariance.ranks:ops_rank",
            num_ranks=NUM_RANKS,
            directory=directory,
            arguments={"selection": selection, "dtype": dtype, "seed": seed, "device": device},
            timeout_s=timeout_s,
        )
        with _counting(directory, len(found), progress):
            outcomes = launcher.run(job)
        reports, failures = collect(directory, found, getattr(torch, dtype))
        lost = _lost(outcomes, directory)
    return OpsMatrix(
        dtype=dtype,
        device=device,
        reports=tuple(reports),
        failures=(*lost, *failures),
        seconds=round(time.monotonic() - started, 1),
        versions=versions(),
    )


@contextmanager
def _counting(
    directory: Path, num_operators: int, progress: Callable[[str], None]
) -> Iterator[None]:
    """Says how many results the ranks have written so far."""
    expected = num_operators * (1 + len(LOCAL) + sum(RANK_COUNTS))
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            done = sum(1 for _ in directory.glob("cells-*.json"))
            progress(f"{num_operators} operators on {NUM_RANKS} ranks: {done} of {expected}")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _lost(outcomes: Sequence[RankOutcome], directory: Path) -> list[str]:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if not failed:
        return []
    first = first_to_fail(failed)
    at = directory / f"now-{first.rank}.txt"
    where = f", at {at.read_text()}" if at.exists() else ""
    return [
        f"{len(failed)} of {len(outcomes)} ranks did not end well: rank {first.rank} "
        f"{first.status}: {first.detail}{where}"
    ]


def collect(
    directory: Path, operators: Sequence[tuple[Operator, str]], dtype: torch.dtype
) -> tuple[list[Report], list[str]]:
    """Every file that the ranks wrote -> one report an operator, and what failed."""
    reports = [
        Report(
            operator=op.name,
            expect=expect,
            must_differ=op.must_differ,
            error_limit=error_limit(dtype, getattr(op, "parts", 1)),
        )
        for op, expect in operators
    ]
    failures = []
    for path in sorted(directory.glob("cells-*.json")):
        data = json.loads(path.read_text())
        report, (operator, _) = reports[data["number"]], operators[data["number"]]
        report.errors.update(data["errors"] or {})
        if data["failure"]:
            failures.append(f"{report.operator}: {data['failure']}")
        props = [p for p in PROPERTIES if operator.chunks or p != "chunked"]
        report.expected.update((tensor, prop) for tensor in data["tensors"] for prop in props)
        for tensor, prop, difference in data["cells"]:
            found = difference and Difference(**{**difference, "index": tuple(difference["index"])})
            add_cells(report, prop, {tensor: found})
    return reports, failures


def ops_grid(matrix: OpsMatrix) -> Grid:
    """A row a tensor, a column a property, and the error against the float64 oracle."""
    rows = tuple(
        ((report.operator, tensor), (*_squares(report, tensor), _error(report, tensor)))
        for report in matrix.reports
        for tensor in _tensors(report)
    )
    said = [
        f"{report.expect}: {report.red[0]}"
        for report in matrix.reports
        if report.expect != "invariant" and report.red
    ]
    return Grid(
        title=f"the same bits, {matrix.dtype} on {matrix.device}",
        status=matrix.status,
        summary=matrix.summary(),
        first=tuple(matrix.wrong),
        tables=(
            GridTable(
                title="", labels=("operator", "tensor"), columns=(*PROPERTIES, "error"), rows=rows
            ),
        ),
        notes=(
            *said,
            "error: deviation from the float64 oracle, in roundings of the inputs; - is: no oracle",
        ),
    )


def _tensors(report: Report) -> list[str]:
    """Outputs, then the gradients of the inputs and of the weights."""
    names = list(dict.fromkeys(tensor for tensor, _ in report.cells))
    return sorted(names, key=lambda name: (name not in ("y", "loss"), names.index(name)))


def _squares(report: Report, tensor: str) -> Iterator[Square]:
    """Other bits fail where the operator must be invariant; elsewhere they are only marked."""
    for prop in PROPERTIES:
        difference = report.cells.get((tensor, prop))
        if (tensor, prop) not in report.cells:
            yield Square(text="-", status="none")
        elif difference is None:
            yield Square(text="same", status="pass")
        else:
            word = {"nan": "NaN", "error": "ERROR"}.get(difference.kind, "DIFFERS")
            status = "fail" if report.expect == "invariant" else "unknown"
            if report.expect == "planted":
                status = "none"  # as it must be
            yield Square(text=word, status=status, says=f"{report.operator}, {prop}: {difference}")


def _error(report: Report, tensor: str) -> Square:
    error = report.errors.get(tensor)
    return Square(text="-" if error is None else f"{error:.1f}", status="none")
