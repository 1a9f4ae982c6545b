"""The kill matrix of the plan faults: topologies x faults, on one warm fork server.

A fault that is visible must be noticed and named; one that is invisible on a topology must pass; a
clean run must pass. Anything else is listed first and fails the matrix.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.catalogue import shipped_topologies
from sumgrad.check import CheckOptions, run_check
from sumgrad.faults import find_fault, plan_faults
from sumgrad.launch import Launcher
from sumgrad.topology import load_topology
from sumgrad.verdict import Verdict

# What kind of cause the Diagnosis must name for each fault.
NAMED_AS = {
    "avg_on_ci": "avg",
    "faith_on_all_ranks": "replicated_contribution",
    "skip_block_reduce": "skipped_reduction",
    "divide_by_ci_count": "factor",
    "drop_message": "lost_message",
    "imp_local_statistic": "local_statistic",
    "imp_differentiable_sum": "differentiable_sum",
    "times_ci_then_avg": "compensated",
    "stale_buffer": "stale_buffer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. result: killed, law, invisible, clean; or missed, misnamed, mispredicted, alarm,
    crashed, which fail the matrix."""

    topology: str
    fault: str | None
    result: str
    cause: str | None
    predicted: float | None

    @property
    def ok(self) -> bool:
        return self.result in ("killed", "law", "invisible", "clean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All cells, in the order they ran."""

    cells: tuple[Cell, ...]

    @property
    def ok(self) -> bool:
        return bool(self.cells) and all(cell.ok for cell in self.cells)

    def summary(self) -> str:
        """One line with the counts."""
        counts: dict[str, int] = {}
        for cell in self.cells:
            counts[cell.result] = counts.get(cell.result, 0) + 1
        text = ", ".join(f"{n} {result}" for result, n in sorted(counts.items()))
        return f"{'PASS' if self.ok else 'FAIL'}: {text}"

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, "ok": self.ok, "cells": [asdict(cell) for cell in self.cells]}


def default_topologies() -> list[Path]:
    """Every shipped topology that can be started."""
    return [path for path in shipped_topologies() if not load_topology(path).plan_only]


def run_matrix(
    topologies: Sequence[Path],
    *,
    faults: Sequence[str] | None,
    seed: int,
    timeout_s: float,
    launcher: Launcher,
    progress: Callable[[str], None],
) -> Matrix:
    """Every clean topology once, then every fault on it against the same reference.

    Raises UserError for unknown names.
    """
    chosen = [find_fault(name) for name in faults] if faults else list(plan_faults().values())
    steps = max(fault.min_steps for fault in chosen)
    cells = []
    for path in topologies:
        with tempfile.TemporaryDirectory(prefix="sumgrad-") as directory:
            base = CheckOptions(
                topology=path,
                seed=seed,
                steps=steps,
                tiers=("structure",),
                timeout_s=timeout_s,
                keep_partials=True,
                out=Path(directory, "clean"),
            )
            progress(f"{path.stem}: clean")
            clean, stored = run_check(base, launcher=launcher)
            cells.append(cell_of(path.stem, None, clean))
            for fault in chosen:
                progress(f"{path.stem}: {fault.name}")
                out = Path(directory, fault.name)
                options = replace(base, fault=fault.name, out=out, reuse=stored)
                verdict, _ = run_check(options, launcher=launcher)
                cells.append(cell_of(path.stem, fault.name, verdict))
    return Matrix(cells=tuple(cells))


def cell_of(topology: str, fault: str | None, verdict: Verdict) -> Cell:
    """What one verdict means for the matrix."""
    cause = verdict.diagnoses[0].cause if verdict.diagnoses else None
    kind = verdict.diagnoses[0].kind if verdict.diagnoses else None
    report = verdict.data.get("fault_report")
    predicted = report["prediction"].get("worst_of_threshold") if report else None
    if any(o["status"] != "ok" for o in verdict.data["outcomes"]):
        result = "crashed"
    elif fault is None or report is None:
        result = "clean" if verdict.status == "pass" else "alarm"
    elif report["visible"] or report["breaks_law"]:
        if verdict.status != "fail":
            result = "missed"
        elif kind != NAMED_AS[fault]:
            result = "misnamed"
        elif not report["prediction"].get("agrees"):
            result = "mispredicted"
        else:
            result = "killed" if report["visible"] else "law"
    else:
        result = "invisible" if verdict.status == "pass" else "alarm"
    return Cell(topology=topology, fault=fault, result=result, cause=cause, predicted=predicted)


def render_matrix(matrix: Matrix) -> RenderableType:
    """Failures first, then the table."""
    parts: list[RenderableType] = []
    for cell in matrix.cells:
        if not cell.ok:
            line = f"{cell.result}: {cell.fault or 'clean'} on {cell.topology}: {cell.cause}"
            parts.append(Text(line, style="bold red"))
    topologies = list(dict.fromkeys(cell.topology for cell in matrix.cells))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("fault")
    for name in topologies:
        table.add_column(name.removeprefix("three_pool_"))
    for fault in dict.fromkeys(cell.fault for cell in matrix.cells):
        row = [
            next((c.result for c in matrix.cells if (c.fault, c.topology) == (fault, name)), "-")
            for name in topologies
        ]
        table.add_row(fault or "(clean)", *row)
    return Group(*parts, table)
