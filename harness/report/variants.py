"""The matrix of `sumgrad diff --variant` as a Grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sumgrad.report.grid import EMPTY, Grid, GridTable, Square
from sumgrad.report.terminal import number


def variants_grid(data: Mapping[str, Any]) -> Grid:
    """One row for each way to start the script, one column for each number of ranks."""
    columns = sorted({cell["ranks"] for cell in data["cells"]})
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for cell in data["cells"]:
        rows.setdefault(cell["variant"], {})[cell["ranks"]] = cell
    table = GridTable(
        title="",
        labels=("started",),
        columns=tuple(_column(ranks) for ranks in columns),
        rows=tuple(
            ((name,), tuple(_square(row[n]) if n in row else EMPTY for n in columns))
            for name, row in rows.items()
        ),
    )
    return Grid(
        title=f"{data['script']}: {data['steps']} steps, {data['dtype'] or 'nothing compared'}, "
        f"against one process as given",
        status=data["status"],
        summary=f"{data['status'].upper()} {data['script']} in {len(rows)} ways",
        tables=(table,),
        notes=(*_said(data), *data["said"]),
    )


def _said(data: Mapping[str, Any]) -> Iterator[str]:
    """What each cell says, and how to see all of it."""
    for cell in data["cells"]:
        if cell["text"]:
            yield f"{cell['variant']}, {_column(cell['ranks'])}: {cell['text']}"
            yield f"  sumgrad report {cell['run']}"


def _column(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} ranks"


def _square(cell: Mapping[str, Any]) -> Square:
    """A verdict, how near to the threshold, and how many tensors have other bits."""
    words = [cell["status"].upper()]
    if cell["worst_of_threshold"] is not None:
        words.append(f"{number(cell['worst_of_threshold'])} of threshold")
    if cell["differing_tensors"] is not None:
        words.append(
            f"{cell['differing_tensors']} of {cell['tensors']} other bits"
            if cell["differing_tensors"]
            else "same bits"
        )
    return Square(text=", ".join(words), status=cell["status"], says=cell["text"])
