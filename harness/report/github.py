"""A verdict for a GitHub workflow: annotations at the user's line, and the job's summary.

Workflow commands are lines on standard output; what stands in them is escaped as GitHub reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sumgrad.base.plain_text import printable_data
from sumgrad.base.verdict import Verdict
from sumgrad.report.grid import Grid, plain

LEVELS = {"fail": "error", "unknown": "warning", "pass": "notice"}
MAX_TEXT = 1000
MOST_LINES = 10  # of a matrix; GitHub shows no more of a step
_PLACE = re.compile(r"(?:^|[\s(])((?:[\w.-]+/|/)*[\w.-]+\.py):(\d+)")


def workflow_lines(verdict: Verdict, *, root: Path) -> Iterator[str]:
    """One line for each cause, or one for what else the verdict says.

    root: of the repository; a file in it is named from there, another one is not named.
    """
    data = printable_data(verdict.data)
    level, title = LEVELS[data["status"]], f"sumgrad {data['status'].upper()}: {data['workload']}"
    causes = data["diagnoses"]
    if data["status"] == "pass":
        yield _line(level, title, f"every gradient is right on {data['topology']['name']}", None)
    elif causes:
        for cause in causes:
            text = f"{cause['cause']}" + (
                f" ({cause['standing']})" if cause.get("standing") else ""
            )
            yield _line(level, title, text, _place(cause, root))
    else:
        said = [*data["findings"], *data["not_compared"]]
        yield _line(level, title, said[0] if said else "see the report", None)


def grid_lines(grid: Grid) -> Iterator[str]:
    """One line for each thing that fails a matrix, or one for the whole."""
    grid = plain(grid)
    title = f"sumgrad {grid.status.upper()}: {grid.title}"
    for text in grid.first[:MOST_LINES] or (grid.summary,):
        yield _line(LEVELS[grid.status], title, text, None)


def _place(cause: Mapping[str, Any], root: Path) -> tuple[str, int] | None:
    """The first line of a file of the repository that a cause or its reasons name."""
    for text in (cause["cause"], *cause["because"]):
        for file, line in _PLACE.findall(text):
            path = (root / file).resolve()
            if path.is_file() and path.is_relative_to(root.resolve()):
                return path.relative_to(root.resolve()).as_posix(), int(line)
    return None


def _line(level: str, title: str, text: str, place: tuple[str, int] | None) -> str:
    fields = [f"file={_field(place[0])},line={place[1]}"] if place else []
    fields.append(f"title={_field(title)}")
    return f"::{level} {','.join(fields)}::{_escaped(text[:MAX_TEXT])}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
