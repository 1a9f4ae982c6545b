"""Stored runs: what `.sumgrad/runs` holds, and how old ones go."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sumgrad.base.plain_text import printable

FOLDER = Path(".sumgrad") / "runs"
STYLES = {"pass": "green", "fail": "bold red", "unknown": "yellow"}


def stored_runs(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Every run below a folder, the latest first: directory, status, what was run, when, bytes.

    A run without a verdict (it was interrupted, or runs still) has the status None.
    """
    found = []
    for path in folder.glob("*/run.json"):
        directory = path.parent
        if directory.is_symlink():
            continue
        try:
            verdict = json.loads((directory / "verdict.json").read_text())
        except (OSError, ValueError):
            verdict = {}
        topology = verdict.get("topology")
        found.append(
            {
                "directory": str(directory),
                "status": verdict.get("status"),
                "workload": verdict.get("workload"),
                "topology": topology.get("name") if isinstance(topology, dict) else None,
                "made": path.stat().st_mtime,
                "bytes": sum(f.stat().st_size for f in directory.rglob("*") if f.is_file()),
            }
        )
    return sorted(found, key=lambda run: -run["made"])


def prune(runs: list[dict[str, Any]], keep: int) -> list[dict[str, Any]]:
    """Remove all but the latest runs; returns those that are gone. Kept baselines are no runs."""
    old = runs[keep:]
    for run in old:
        shutil.rmtree(run["directory"])
    return old


def render_runs(runs: list[dict[str, Any]], gone: list[dict[str, Any]]) -> RenderableType:
    """A table, the latest first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("run", "status", "what", "made"):
        table.add_column(name, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for run in runs:
        status = run["status"] or "no verdict"
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["made"]))
        what = " on ".join(str(run[k]) for k in ("workload", "topology") if run[k])
        table.add_row(
            printable(run["directory"]),
            Text(status.upper(), style=STYLES.get(status, "dim")),
            printable(what),
            made,
            f"{run['bytes'] / 1e6:.1f} MB",
        )
    parts: list[RenderableType] = [table] if runs else [Text("no stored runs here", style="dim")]
    if gone:
        size = sum(run["bytes"] for run in gone) / 1e6
        parts.append(Text(f"removed {len(gone)} older runs, {size:.1f} MB", style="dim"))
    return Group(*parts)
