"""The kill matrix on the terminal: what fails first, then a table for each workload."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.faults.collective import KINDS
from sumgrad.faults.matrix import Cell, Matrix
from sumgrad.faults.plan import plan_faults


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
