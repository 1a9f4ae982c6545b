"""The matrix of `sumgrad diff --variant`: on the terminal and in markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.base.plain_text import printable, printable_data
from sumgrad.report.files import markdown
from sumgrad.report.terminal import number

STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def render_variants(data: Mapping[str, Any]) -> RenderableType:
    """One row for each way to start the script, one column for each number of ranks."""
    data = printable_data(data)
    table = Table(title=_title(data), title_justify="left", title_style="bold", box=None,
                  pad_edge=False, header_style="dim")  # fmt: skip
    columns = sorted({cell["ranks"] for cell in data["cells"]})
    table.add_column("")
    for ranks in columns:
        table.add_column(_column(ranks))
    for name, row in _rows(data).items():
        cells = [_short(row[n], data) if n in row else ("", "dim") for n in columns]
        table.add_row(name, *(Text(text, style=style) for text, style in cells))
    parts: list[RenderableType] = [table]
    for cell in data["cells"]:
        if cell["text"]:
            parts.append(Text(f"{_name(cell)}: {cell['text']}"))
            parts.append(Text(f"  sumgrad report {cell['run']}", style="dim"))
    parts += [Text(text, style="dim") for text in data["said"]]
    return Group(*parts)


def variants_to_markdown(data: Mapping[str, Any]) -> str:
    """The same as a table to paste."""
    columns = sorted({cell["ranks"] for cell in data["cells"]})
    lines = [
        f"**{markdown(_title(data))}**",
        "",
        "| | " + " | ".join(_column(ranks) for ranks in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, row in _rows(data).items():
        cells = [_short(row[n], data)[0] if n in row else "" for n in columns]
        lines.append("| " + " | ".join(markdown(text) for text in (name, *cells)) + " |")
    said = [f"{_name(cell)}: {cell['text']}" for cell in data["cells"] if cell["text"]]
    said += data["said"]
    lines += ["", *(f"- {markdown(printable(text))}" for text in said)]
    return "\n".join(lines).rstrip() + "\n"


def _title(data: Mapping[str, Any]) -> str:
    return (
        f"{data['script']}: {data['steps']} steps, {data['dtype'] or 'nothing compared'}, against "
        f"one process as given"
    )


def _column(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} ranks"


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['variant']}, {_column(cell['ranks'])}"


def _rows(data: Mapping[str, Any]) -> dict[str, dict[int, Mapping[str, Any]]]:
    rows: dict[str, dict[int, Mapping[str, Any]]] = {}
    for cell in data["cells"]:
        rows.setdefault(cell["variant"], {})[cell["ranks"]] = cell
    return rows


def _short(cell: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[str, str]:
    """A verdict, how near to the threshold, and how many tensors have other bits; its style."""
    words = [cell["status"].upper()]
    if cell["worst_of_threshold"] is not None:
        words.append(f"{number(cell['worst_of_threshold'])} of threshold")
    if cell["differing_tensors"] is not None:
        words.append(
            f"{cell['differing_tensors']} of {cell['tensors']} other bits"
            if cell["differing_tensors"]
            else "same bits"
        )
    return ", ".join(words), STYLES[cell["status"]]
