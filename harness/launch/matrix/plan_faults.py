"""The kill matrix of the plan faults: topologies x faults, on one warm fork server.

A fault that is visible must be noticed and named; one that is invisible on a topology must pass; a
clean run must pass. Anything else is listed first and fails the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.base.verdict import Verdict
from sumgrad.faults.collective import KINDS
from sumgrad.faults.plan import find_fault, plan_faults
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.matrix.cells import Cell, Matrix
from sumgrad.launch.matrix.programs import run_program_matrix
from sumgrad.subjects.loading import chosen_workload, find_class
from sumgrad.subjects.program.protocol import is_program
from sumgrad.topology.pools import load_topology
from sumgrad.topology.shipped import shipped_topologies

Progress = Callable[[str], None]

# What kind of cause the Diagnosis must name for each fault.
NAMED_AS = {
    "avg_on_ci": "avg",
    "faith_on_all_ranks": "replicated_contribution",
    "skip_block_reduce": "skipped_reduction",
    "divide_by_ci_count": "factor",
    "block_over_ci_size": "factor",
    "drop_message": "lost_message",
    "imp_local_statistic": "local_statistic",
    "imp_differentiable_sum": "differentiable_sum",
    "times_ci_then_avg": "compensated",
    "stale_buffer": "stale_buffer",
}


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
    progress: Progress,
    workload: str | None = None,
    quick: bool = False,
) -> Matrix:
    """Every clean topology once, then every fault on it against the same reference.

    workload: instead of the one that each topology names. quick: fewer of a Program's collectives.
    Raises UserError for unknown names.
    """
    cells: list[Cell] = []
    for path in topologies:
        topology = load_topology(path)
        program = is_program(find_class(*chosen_workload(topology, workload)))
        run = run_program_matrix if program else run_plan_matrix
        cells += run(
            path,
            workload=workload,
            faults=faults,
            quick=quick,
            seed=seed,
            timeout_s=timeout_s,
            launcher=launcher,
            progress=progress,
        )
    return Matrix(cells=tuple(cells))


def run_plan_matrix(
    path: Path,
    *,
    workload: str | None,
    faults: Sequence[str] | None,
    quick: bool = False,
    seed: int,
    timeout_s: float,
    launcher: Launcher,
    progress: Progress,
) -> list[Cell]:
    """All cells of a planned workload on one topology. quick: changes nothing, faults are few.

    Raises UserError.
    """
    del quick
    chosen = [find_fault(name) for name in faults] if faults else list(plan_faults().values())
    cells = []
    with launcher.temporary_directory() as directory:
        base = CheckOptions(
            topology=path,
            workload=workload,
            seed=seed,
            steps=max(fault.min_steps for fault in chosen),
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
    return cells


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
    return Cell(
        topology=topology,
        workload=verdict.data["workload"],
        fault=fault,
        result=result,
        cause=cause,
        kind=kind,
        by="comparison" if result == "killed" else "ledger" if result == "law" else None,
        predicted=predicted,
    )


def render_matrix(matrix: Matrix) -> RenderableType:
    """What fails first, then a table for each workload: faults down, topologies across."""
    parts: list[RenderableType] = []
    for cell in matrix.bad():
        line = f"{cell.result}: {cell.fault or 'clean'} on {cell.topology}: {cell.cause}"
        parts.append(Text(line, style="bold red"))
    for workload in dict.fromkeys(cell.workload for cell in matrix.cells):
        mine = [cell for cell in matrix.cells if cell.workload == workload]
        planned = any(cell.fault in plan_faults() for cell in mine)
        parts += [_table(mine) if planned else _collectives(mine), Text("")]
    return Group(*parts)


def _table(cells: Sequence[Cell]) -> Table:
    """One row for each fault, one column for each topology."""
    topologies = list(dict.fromkeys(cell.topology for cell in cells))
    table = _new_table(cells[0].workload)
    table.add_column("fault")
    for name in topologies:
        table.add_column(name.removeprefix("three_pool_"))
    by_place = {(cell.fault, cell.topology): cell.result for cell in cells}
    for fault in dict.fromkeys(cell.fault for cell in cells):
        row = [by_place.get((fault, name), "-") for name in topologies]
        table.add_row(fault or "(clean)", *row)
    return table


def _collectives(cells: Sequence[Cell]) -> Group:
    """For each topology: one row for each collective, one column for each kind of fault."""
    tables: list[RenderableType] = []
    for topology in dict.fromkeys(cell.topology for cell in cells):
        mine = [cell for cell in cells if cell.topology == topology]
        table = _new_table(f"{cells[0].workload} on {topology}")
        kinds = [
            kind for kind in KINDS if any(c.fault and c.fault.startswith(f"{kind}:") for c in mine)
        ]
        table.add_column("")
        for kind in kinds:
            table.add_column(kind)
        by_place = {cell.fault: cell.result for cell in mine}
        targets = dict.fromkeys(c.fault.split(":")[1] for c in mine if c.fault and ":" in c.fault)
        for target in targets:
            table.add_row(target, *(by_place.get(f"{kind}:{target}", "") for kind in kinds))
        for cell in mine:
            if cell.fault is None or ":" not in cell.fault:
                table.add_row(cell.fault or "(clean)", cell.result)
        tables.append(table)
    return Group(*tables)


def _new_table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False,
        header_style="dim",
    )  # fmt: skip
