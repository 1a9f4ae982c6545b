"""The kill matrix as a Grid: of planned workloads faults down and topologies across, of Programs
collectives down and kinds of fault across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sumgrad.base.verdict import Status
from sumgrad.faults.collective import KINDS
from sumgrad.faults.matrix import UNTOLD, Cell, Matrix
from sumgrad.faults.plan import plan_faults
from sumgrad.report.grid import EMPTY, Grid, GridTable, Square

NOTE = {
    "killed": "killed: the gradients are wrong, and the check said so",
    "law": "law: no gradient is wrong, the ledger shows the fault",
    "invisible": "invisible: this topology cannot show it, and that was said beforehand",
    "died": "died: the fault ended the ranks; no kill of the comparison",
    "missed": "missed: a gradient is wrong and the check passed",
    "misnamed": "misnamed: killed, by another cause than the planted one",
    "allowed": "allowed: missed, and on your list of what need not be noticed",
    "unknown": "unknown: the step itself, without a fault, is not known to be right",
    "unattacked": "unattacked: whether the check notices a collective that goes wrong is not known",
}
COLLECTIVES = "allreduce@dp#1: the second all-reduce of a step over the ranks of axis dp"
NOT_KILLED = ("invisible", "died", "allowed", "misnamed")


def matrix_grid(matrix: Matrix) -> Grid:
    """What fails first, then the tables."""
    tables: list[GridTable] = []
    for workload in dict.fromkeys(cell.workload for cell in matrix.cells):
        mine = [cell for cell in matrix.cells if cell.workload == workload]
        planned = any(cell.fault in plan_faults() for cell in mine)
        tables += [_by_fault(mine)] if planned else _by_collective(mine)
    return Grid(
        title="planted faults",
        status=matrix.status,
        summary=matrix.summary(),
        first=tuple(
            f"{cell.result}: {cell.fault or 'clean'} on {cell.topology}: {cell.cause}"
            for cell in matrix.bad()
        ),
        tables=tuple(tables),
        notes=tuple(
            [NOTE[result] for result in NOTE if result in matrix.counts]
            + ([COLLECTIVES] if any(":" in (cell.fault or "") for cell in matrix.cells) else [])
            + [f"--allow {pattern}: matches nothing that was missed" for pattern in matrix.unused]
        ),
    )


def _square(cell: Cell | None) -> Square:
    if cell is None:
        return EMPTY
    says = f"{cell.fault or 'clean'} on {cell.topology}: {cell.cause or 'no cause'}"
    if cell.result in NOT_KILLED:
        return Square(text=cell.result, status="none", says=says)
    status: Status = "unknown" if cell.result in UNTOLD else "pass" if cell.ok else "fail"
    return Square(text=cell.result, status=status, says=says)


def _by_fault(cells: Sequence[Cell]) -> GridTable:
    """One row for each fault, one column for each topology."""
    topologies = list(dict.fromkeys(cell.topology for cell in cells))
    found = {(cell.fault, cell.topology): cell for cell in cells}
    return GridTable(
        title=cells[0].workload,
        labels=("fault",),
        columns=tuple(name.removeprefix("three_pool_") for name in topologies),
        rows=tuple(
            ((fault or "(clean)",), tuple(_square(found.get((fault, name))) for name in topologies))
            for fault in dict.fromkeys(cell.fault for cell in cells)
        ),
    )


def _by_collective(cells: Sequence[Cell]) -> Iterator[GridTable]:
    """For each topology: one row for each collective, one column for each kind of fault; what is
    planted in no collective has rows of its own."""
    for topology in dict.fromkeys(cell.topology for cell in cells):
        mine = {cell.fault: cell for cell in cells if cell.topology == topology}
        faults = [fault for fault in mine if fault and ":" in fault]
        kinds = [kind for kind in KINDS if any(fault.startswith(f"{kind}:") for fault in faults)]
        rows = [
            ((target,), tuple(_square(mine.get(f"{kind}:{target}")) for kind in kinds))
            for target in dict.fromkeys(fault.split(":")[1] for fault in faults)
        ]
        if rows:
            yield GridTable(
                title=f"{cells[0].workload} on {topology}", labels=("collective",),
                columns=tuple(kinds), rows=tuple(rows),
            )  # fmt: skip
        yield GridTable(
            title="" if rows else f"{cells[0].workload} on {topology}",
            labels=("planted in the step",),
            columns=("result",),
            rows=tuple(
                ((fault or "(clean)",), (_square(cell),))
                for fault, cell in mine.items()
                if fault not in faults
            ),
        )
