"""A verdict as SARIF 2.1.0 (OASIS), for services that show findings at lines of code.

A verdict that passes has no result, so that what was said of a line before is closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from sumgrad import __version__
from sumgrad.base.files import json_text
from sumgrad.base.verdict import Verdict
from sumgrad.report.grid import Grid
from sumgrad.report.messages import Message, grid_messages, messages_of, workspace

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"fail": "error", "unknown": "warning"}


def to_sarif(verdict: Verdict) -> str:
    """One result for each cause, or one for what else the verdict says."""
    workload = str(verdict.data["workload"]).partition(":")[0]
    return _log(messages_of(verdict, root=workspace()), elsewhere=_in_workspace(workload))


def grid_to_sarif(grid: Grid) -> str:
    """One result for each thing that fails a matrix."""
    return _log(grid_messages(grid), elsewhere=None)


def _in_workspace(file: str) -> str | None:
    """A file as the repository names it, if it is one of its files."""
    root = workspace().resolve()
    path = (root / file).resolve()
    return path.relative_to(root).as_posix() if path.is_file() and root in path.parents else None


def _log(messages: Iterable[Message], *, elsewhere: str | None) -> str:
    """elsewhere: the file at whose first line a message without a place stands."""
    shown = [m for m in messages if m.status in LEVELS]
    rules = [
        {"id": kind, "shortDescription": {"text": kind.replace("_", " ")}}
        for kind in dict.fromkeys(m.kind for m in shown)
    ]
    driver = {"name": "sumgrad", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": [_result(m, elsewhere) for m in shown]}
    return json_text({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _result(message: Message, elsewhere: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": message.kind,
        "level": LEVELS[message.status],
        "message": {"text": f"{message.title}\n{message.text}"},
    }
    place = message.place or (elsewhere and (elsewhere, 1))
    if place:
        file, line = place
        where = {"artifactLocation": {"uri": quote(file)}, "region": {"startLine": line}}
        result["locations"] = [{"physicalLocation": where}]
    return result
