"""A matrix of cells, as every command that makes one shows it: faults, operators, variants.

What makes a matrix turns it into a Grid; a Grid is shown on the terminal here, and in files by
`grid_files`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.base.plain_text import printable
from sumgrad.base.verdict import Status

STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow", "none": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """One cell. status: pass, fail, unknown, or none where it says nothing. says: all of it."""

    text: str
    status: str
    says: str = ""


EMPTY = Square(text="", status="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class GridTable:
    """labels: heads of the columns that name a row; columns: of the cells."""

    title: str
    labels: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Square, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """title: what was asked; summary: one line. first: what fails it, worst first, or of one that
    passes what is to be looked at. notes: what a reader of the tables should know."""

    title: str
    status: Status
    summary: str
    tables: tuple[GridTable, ...]
    first: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def plain(grid: Grid) -> Grid:
    """With every text as it can be shown: names and messages come from users' code."""
    tables = [
        GridTable(
            title=printable(table.title),
            labels=tuple(map(printable, table.labels)),
            columns=tuple(map(printable, table.columns)),
            rows=tuple(
                (tuple(map(printable, labels)), tuple(_plain(s) for s in squares))
                for labels, squares in table.rows
            ),
        )
        for table in grid.tables
    ]
    return Grid(
        title=printable(grid.title),
        status=grid.status,
        summary=printable(grid.summary),
        tables=tuple(tables),
        first=tuple(map(printable, grid.first)),
        notes=tuple(map(printable, grid.notes)),
    )


def _plain(square: Square) -> Square:
    return Square(text=printable(square.text), status=square.status, says=printable(square.says))


def render_grid(grid: Grid) -> RenderableType:
    """What fails first, then the tables, then the notes."""
    grid = plain(grid)
    style = "bold red" if grid.status == "fail" else "yellow"
    parts: list[RenderableType] = [Text(text, style=style) for text in grid.first]
    if parts:
        parts.append(Text(""))
    for table in grid.tables:
        parts += [_table(table), Text("")]
    parts += [Text(text, style="dim") for text in grid.notes]
    return Group(*parts)


def cells_of(grid: Grid, *, silent: bool = False) -> Sequence[tuple[str, Square]]:
    """Every cell that says something, by the names of its table, row and column.

    silent: those too that have a word and no status, as what is invisible.
    """
    return [
        (", ".join(part for part in (table.title, *labels, column) if part), square)
        for table in grid.tables
        for labels, squares in table.rows
        for column, square in zip(table.columns, squares, strict=True)
        if square.status != "none" or (silent and square.text)
    ]


def _table(table: GridTable) -> Table:
    shown = Table(
        title=table.title, title_justify="left", title_style="bold", box=None,
        pad_edge=False, header_style="dim",
    )  # fmt: skip
    for name in (*table.labels, *table.columns):
        shown.add_column(name, overflow="fold")
    before: tuple[str, ...] = ()
    for labels, squares in table.rows:
        same = len(labels) > 1 and labels[:1] == before[:1]
        names = ("", *labels[1:]) if same else labels
        before = labels
        shown.add_row(
            *(Text(name) for name in names),
            *(Text(s.text, style=STYLES[s.status]) for s in squares),
        )
    return shown
