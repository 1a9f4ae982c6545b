"""A Grid as a file for others to read: markdown, HTML, JUnit XML."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from sumgrad.report.files import environment, junit_text, markdown, page_script
from sumgrad.report.grid import Grid, GridTable, Square, cells_of, plain

MOST_ROWS = 40  # of a table in markdown that people see without a click
MOST_SAID = 20  # lines of what fails; the files with every cell are the others


def grid_to_markdown(grid: Grid) -> str:
    """To paste: what fails, then the tables, each folded if it is long."""
    grid = plain(grid)
    lines = [f"# {grid.status.upper()}: {markdown(grid.title)}", "", markdown(grid.summary), ""]
    lines += [f"- {markdown(text)}" for text in grid.first[:MOST_SAID]]
    if len(grid.first) > MOST_SAID:
        lines.append(f"- and {len(grid.first) - MOST_SAID} more")
    for table in grid.tables:
        lines += ["", *_folded(table)]
    lines += ["", *(f"- {markdown(text)}" for text in grid.notes)]
    return "\n".join(lines).rstrip() + "\n"


def grid_to_html(grid: Grid) -> str:
    """One self-contained page, as a verdict's."""
    script, digest = page_script()
    template = environment(autoescape=True).get_template("grid.html.jinja")
    return template.render(grid=plain(grid), script=script, script_hash=digest)


def grid_to_junit(grid: Grid) -> str:
    """One test case a cell, and one for what fails without being a cell's."""
    grid = plain(grid)
    suite = Element("testsuite", name=f"sumgrad {grid.title}")
    for name, square in cells_of(grid, silent=True):
        case = SubElement(suite, "testcase", classname=f"sumgrad.{grid.title}", name=name)
        if square.status == "none":
            SubElement(case, "skipped", message=f"{square.text}: {square.says}".rstrip(": "))
        if square.status == "fail":
            _say(case, "failure", square)
        elif square.status == "unknown":
            _say(case, "error", square)
    case = SubElement(suite, "testcase", classname=f"sumgrad.{grid.title}", name="the whole")
    if grid.status != "pass":
        kind = "failure" if grid.status == "fail" else "error"
        found = SubElement(case, kind, message=grid.summary)
        found.text = "\n".join(grid.first)
    return junit_text(suite)


def _say(case: Element, kind: str, square: Square) -> None:
    SubElement(case, kind, message=square.text).text = square.says


def _folded(table: GridTable) -> Sequence[str]:
    lines = [
        _row((*table.labels, *table.columns)),
        "|---" * (len(table.labels) + len(table.columns)) + "|",
        *(_row((*labels, *(s.text for s in squares))) for labels, squares in table.rows),
    ]
    if len(table.rows) <= MOST_ROWS:
        return [f"**{markdown(table.title)}**", "", *lines] if table.title else lines
    title = markdown(table.title) or "all of it"
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(markdown(cell) for cell in cells) + " |"
