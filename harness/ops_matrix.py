"""`sumgrad ops`: operators x properties on raw bits, with accuracy in a column of its own.

The work is done by ranks (`ops_rank`); here it is started, collected and shown. A matrix is ok if
our operators are green, every planted one is red, and every rank ended well; torch's controls are
reported as they are.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.arrangement import PROPERTIES, RANK_COUNTS
from sumgrad.errors import UserError
from sumgrad.invariance import Difference, Report, add_cells
from sumgrad.launch import Launcher, RankJob
from sumgrad.ops_rank import LOCAL, NUM_RANKS, load_operators
from sumgrad.outcome import RankOutcome, first_to_fail

OURS = "sumgrad.workloads.operators:shipped"
PLANTED = "sumgrad.workloads.planted_operators:planted"
CONTROLS = "sumgrad.workloads.control_operators:controls"
ERROR_LIMIT = 16.0  # in units of one rounding of the inputs; measured: at most 7
MARK = {"same": ("same", "green"), "differs": ("DIFFERS", "bold red"), "none": ("-", "dim")}


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
        """What must not be: a red cell of ours, a planted operator not caught, a poor accuracy."""
        out = list(self.failures)
        for report in self.reports:
            if report.expect == "invariant":
                out += list(dict.fromkeys(str(d) for d in report.red))
                out += [
                    f"{report.operator}: {tensor} is {error:.3g} roundings of its inputs off the "
                    f"oracle, more than {ERROR_LIMIT:g}"
                    for tensor, error in report.errors.items()
                    if not error <= ERROR_LIMIT
                ]
            elif report.expect == "planted" and not report.red:
                out.append(f"{report.operator}: planted, and every cell is green")
            if not report.cells:
                out.append(f"{report.operator}: nothing was compared")
        return out

    @property
    def ok(self) -> bool:
        return bool(self.reports) and not self.wrong

    def summary(self) -> str:
        ours = [r for r in self.reports if r.expect == "invariant"]
        planted = [r for r in self.reports if r.expect == "planted"]
        cells = sum(len(r.cells) for r in ours)
        red = sum(len(r.red) for r in ours)
        parts = [f"{cells - red} of {cells} cells of {len(ours)} operators invariant"]
        if planted:
            parts.append(f"{sum(bool(r.red) for r in planted)} of {len(planted)} planted caught")
        return f"{'PASS' if self.ok else 'FAIL'}  {', '.join(parts)} ({self.dtype})"

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
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
                            "status": status(difference),
                            "difference": difference and asdict(difference),
                        }
                        for (tensor, prop), difference in report.cells.items()
                    ],
                }
                for report in self.reports
            ],
        }


def status(difference: Difference | None) -> str:
    """A cell in one word."""
    if difference is None:
        return "same"
    return difference.what if difference.what in ("differs", "nan") else "error"


def operator_names(sources: Sequence[str]) -> list[str]:
    """The names in some sources. Raises UserError for a source that cannot be loaded."""
    try:
        return [operator.name for operator in load_operators(sources)]
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise UserError(f"--op: {error}") from None


def choose(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """What --op asks for -> sources to load, names to keep (empty: all). Raises UserError."""
    files = [name for name in asked if ":" in name and ("/" in name or ".py:" in name)]
    names = [name for name in asked if name not in files]
    sources = [OURS, PLANTED, CONTROLS] if names or not asked else []
    known = operator_names(sources)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UserError(f"--op: no operator {unknown[0]!r}; there are {', '.join(known)}")
    return sources + files, names + (operator_names(files) if names else [])


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
    import time

    from sumgrad.check import versions

    started = time.monotonic()
    sources, names = choose(asked)
    with tempfile.TemporaryDirectory(prefix="sumgrad-ops-") as place:
        directory = Path(place)
        (directory / "ranks").mkdir()
        job = RankJob(
            target="sumgrad.ops_rank:ops_rank",
            num_ranks=NUM_RANKS,
            directory=directory,
            arguments={
                "sources": sources,
                "names": names,
                "dtype": dtype,
                "seed": seed,
                "device": device,
            },
            timeout_s=timeout_s,
        )
        order = [n for n in operator_names(sources) if not names or n in names]
        with _counting(directory, len(order), progress):
            outcomes = launcher.run(job)
        reports, failures = collect(directory, order)
    return OpsMatrix(
        dtype=dtype,
        device=device,
        reports=tuple(reports),
        failures=(*failures, *_lost(outcomes)),
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


def _lost(outcomes: Sequence[RankOutcome]) -> list[str]:
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if not failed:
        return []
    first = first_to_fail(failed)
    return [f"{len(failed)} of {len(outcomes)} ranks did not end well: rank {first.rank} "
            f"{first.status}: {first.detail}"]  # fmt: skip


def collect(directory: Path, order: Sequence[str]) -> tuple[list[Report], list[str]]:
    """Every file that the ranks wrote -> one report an operator, and what failed."""
    reports: dict[str, Report] = {}
    failures = []
    for path in sorted(directory.glob("cells-*.json")):
        data = json.loads(path.read_text())
        name = data["operator"]
        report = reports.setdefault(name, Report(operator=name, expect=data["expect"]))
        report.errors.update(data["errors"])
        if data["failure"]:
            failures.append(f"{name}: the base configuration failed: {data['failure']}")
        for tensor, prop, difference in data["cells"]:
            found = difference and Difference(**{**difference, "index": tuple(difference["index"])})
            add_cells(report, prop, {tensor: found})
    missing = [name for name in order if name not in reports]
    failures += [f"{name}: no rank reported anything" for name in missing]
    return [reports[name] for name in order if name in reports], failures


def render_ops(matrix: OpsMatrix) -> RenderableType:
    """What is wrong first, then the table: a row a tensor, a column a property."""
    parts: list[RenderableType] = [Text(line, style="bold red") for line in matrix.wrong]
    if parts:
        parts.append(Text(""))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("operator")
    table.add_column("tensor")
    for prop in PROPERTIES:
        table.add_column(prop)
    table.add_column("error", justify="right")
    for report in matrix.reports:
        for i, tensor in enumerate(_tensors(report)):
            error = report.errors.get(tensor)
            table.add_row(
                report.operator if i == 0 else "",
                tensor,
                *(_cell(report, tensor, prop) for prop in PROPERTIES),
                "-" if error is None else f"{error:.1f}",
            )
    parts += [table, Text("")]
    shown = [r for r in matrix.reports if r.expect != "invariant" and r.red]
    for report in shown:
        parts.append(Text(f"{report.expect}: {report.red[0]}", style="dim"))
    parts.append(
        Text("error: largest deviation from the float64 oracle, in roundings of the inputs",
             style="dim")
    )  # fmt: skip
    return Group(*parts)


def _tensors(report: Report) -> list[str]:
    """Outputs, then the gradients of the inputs and of the weights."""
    names = dict.fromkeys(tensor for tensor, _ in report.cells)
    return sorted(names, key=lambda name: (name not in ("y", "loss"), list(names).index(name)))


def _cell(report: Report, tensor: str, prop: str) -> Text:
    if (tensor, prop) not in report.cells:
        word, style = MARK["none"]
    else:
        kind = status(report.cells[tensor, prop])
        word, style = MARK["same"] if kind == "same" else MARK["differs"]
        word = {"nan": "NaN", "error": "ERROR"}.get(kind, word)
    return Text(word, style=style)
