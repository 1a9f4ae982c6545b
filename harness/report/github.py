"""A verdict for a GitHub workflow: annotations at the user's line, and the job's summary.

Workflow commands are lines on standard output; what stands in them is escaped as GitHub reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sumgrad.base.verdict import Verdict
from sumgrad.report.grid import Grid
from sumgrad.report.messages import Message, grid_messages, messages_of

LEVELS = {"fail": "error", "unknown": "warning", "pass": "notice"}
MAX_TEXT = 1000
MOST_LINES = 10  # of a matrix; GitHub shows no more of a step


def workflow_lines(verdict: Verdict, *, root: Path) -> Iterator[str]:
    """One line for each message of a verdict. root: of the repository."""
    return map(_line, messages_of(verdict, root=root))


def grid_lines(grid: Grid) -> Iterator[str]:
    """One line for each of the first messages of a matrix."""
    return map(_line, islice(grid_messages(grid), MOST_LINES))


def _line(message: Message) -> str:
    place = message.place
    fields = [f"file={_field(place[0])},line={place[1]}"] if place else []
    fields.append(f"title={_field(message.title)}")
    level = LEVELS[message.status]
    return f"::{level} {','.join(fields)}::{_escaped(message.text[:MAX_TEXT])}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _field(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
