"""What a verdict or a matrix has to say in a few messages, each at the user's line if one is known.

For what is read beside the code: a workflow's annotations, SARIF.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sumgrad.base.plain_text import printable_data
from sumgrad.base.verdict import Status, Verdict
from sumgrad.report.grid import Grid, plain

_PLACE = re.compile(r"(?:^|[\s(])((?:[\w.-]+/|/)*[\w.-]+\.py):(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """kind: of a cause, or what else it is. place: a file, from the repository's root, and a
    line."""

    status: Status
    kind: str
    title: str
    text: str
    place: tuple[str, int] | None = None


def workspace() -> Path:
    """The root of the repository, as GitHub names it; elsewhere the working directory."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or ".")


def messages_of(verdict: Verdict, *, root: Path) -> Iterator[Message]:
    """One for each cause, or one for what else the verdict says.

    root: of the repository; a file in it is named from there, another one is not named.
    """
    data = printable_data(verdict.data)
    status, title = data["status"], f"sumgrad {data['status'].upper()}: {data['workload']}"
    causes = data["diagnoses"]
    if status == "pass":
        text = f"every gradient is right on {data['topology']['name']}"
        yield Message(status=status, kind="pass", title=title, text=text)
    elif causes:
        for cause in causes:
            text = f"{cause['cause']}" + (
                f" ({cause['standing']})" if cause.get("standing") else ""
            )
            yield Message(
                status=status,
                kind=cause.get("kind", "cause"),
                title=title,
                text=text,
                place=_place(cause, root),
            )
    else:
        said = [*data["findings"], *data["not_compared"]]
        kind = "finding" if data["findings"] else "not_compared"
        yield Message(
            status=status, kind=kind, title=title, text=said[0] if said else "see the report"
        )


def grid_messages(grid: Grid) -> Iterator[Message]:
    """One for each thing that fails a matrix, or one for the whole."""
    grid = plain(grid)
    title = f"sumgrad {grid.status.upper()}: {grid.title}"
    for text in grid.first or (grid.summary,):
        yield Message(status=grid.status, kind="matrix", title=title, text=text)


def _place(cause: Mapping[str, Any], root: Path) -> tuple[str, int] | None:
    """The first line of a file of the repository that a cause or its reasons name."""
    for text in (cause["cause"], *cause["because"]):
        for file, line in _PLACE.findall(text):
            path = (root / file).resolve()
            if path.is_file() and path.is_relative_to(root.resolve()):
                return path.relative_to(root.resolve()).as_posix(), int(line)
    return None
