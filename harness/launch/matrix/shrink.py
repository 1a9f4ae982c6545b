"""The smallest topology, and the fewest rows, on which a failing check still fails the same way.

Every axis is tried at smaller sizes, then the rows of the batch; a candidate counts only if it
fails with a cause of the same kind. What is found is written as a YAML of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import yaml
from sumgrad.base.commands import command_line, sumgrad_command
from sumgrad.base.errors import UserError
from sumgrad.base.files import write_bytes
from sumgrad.base.verdict import Verdict
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.subjects.loading import chosen_workload, find_class
from sumgrad.subjects.program.protocol import is_program
from sumgrad.topology.pools import Topology, load_topology, topology_to_json

SIZES = (1, 2, 3, 5)
MAX_TRIES = 48
Progress = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """What was found. command: repeats it. tries: checks that were run."""

    path: Path
    num_ranks: int
    rows: int | None
    command: str
    tries: int

    def sentence(self) -> str:
        """One line for the report."""
        rows = f" and {self.rows} rows" if self.rows is not None else ""
        return f"smallest that still fails: {self.num_ranks} ranks{rows} ({self.tries} tries)"


def shrink(
    options: CheckOptions,
    verdict: Verdict,
    directory: Path,
    *,
    launcher: Launcher,
    progress: Progress,
) -> Shrunk | None:
    """Shrink a check that failed; None if nothing smaller fails. directory: for shrunk.yaml."""
    wanted = kind_of(verdict)
    whole = load_topology(options.topology)
    best, tries = topology_to_json(whole), 0
    with launcher.temporary_directory() as scratch:
        changed = True
        while changed and tries < MAX_TRIES:
            changed = False
            for candidate in _smaller(best, _num_rows(whole, options, verdict)):
                if tries >= MAX_TRIES:
                    break
                tries += 1
                progress(f"shrinking: {_size(candidate)} ranks, try {tries}")
                place = scratch / str(tries)
                if _kind(options, candidate, place, launcher) == wanted:
                    best, changed = candidate, True
                    break
    if best == topology_to_json(whole):
        return None
    path = directory / "shrunk.yaml"
    write_bytes(path, _yaml(best))
    return Shrunk(
        path=path,
        num_ranks=_size(best),
        rows=best["rows"] or best["options"].get("rows"),
        command=command_line([*sumgrad_command(), "run", path, *_flags(options)]),
        tries=tries,
    )


def kind_of(verdict: Verdict) -> str | None:
    """What a failure must have in common with a smaller one; None for no failure."""
    if verdict.status != "fail":
        return None
    return verdict.diagnoses[0].kind if verdict.diagnoses else "finding"


def _kind(
    options: CheckOptions, candidate: dict[str, Any], place: Path, launcher: Launcher
) -> str | None:
    place.mkdir()
    path = place / "t.yaml"
    path.write_bytes(_yaml(candidate))
    try:
        verdict, _ = run_check(
            replace(options, topology=path, out=place / "run"), launcher=launcher
        )
    except UserError:
        return None
    return kind_of(verdict)


def _smaller(best: dict[str, Any], rows: int | None) -> Iterator[dict[str, Any]]:
    """Candidates, the largest steps first: every axis smaller, then fewer rows."""
    for pool, entry in best["pools"].items():
        for axis, size in entry["axes"].items():
            for smaller in SIZES:
                if smaller < size:
                    yield _with_axis(best, pool, axis, smaller)
    now = best["rows"] or best["options"].get("rows") or rows
    for fewer in (1, 2, 3, 5, 8, 13):
        if now is not None and fewer < now:
            if "rows" in best["options"]:
                yield {**best, "options": {**best["options"], "rows": fewer}}
            elif rows is not None:
                yield {**best, "rows": fewer}


def _with_axis(best: dict[str, Any], pool: str, axis: str, size: int) -> dict[str, Any]:
    """The topology with one axis of another size; ranks are numbered anew."""
    pools = {
        name: {"axes": dict(entry["axes"]), "role": entry["role"]}
        for name, entry in best["pools"].items()
    }
    pools[pool]["axes"][axis] = size
    return {**best, "pools": pools}


def _num_rows(topology: Topology, options: CheckOptions, verdict: Verdict) -> int | None:
    """Rows of a Program's batch; a workload's are its own option."""
    if not is_program(find_class(*chosen_workload(topology, options.workload))):
        return None
    return verdict.data.get("num_rows")


def _size(data: dict[str, Any]) -> int:
    return sum(prod(entry["axes"].values()) for entry in data["pools"].values())


def _yaml(data: dict[str, Any]) -> bytes:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if v is not None and v != {}}
        return value

    text: str = yaml.safe_dump(clean(data), sort_keys=False)
    return text.encode()


def _flags(options: CheckOptions) -> list[str]:
    flags = ["--tiers", "structure", "--seed", str(options.seed)]
    for name, value in (
        ("--workload", options.workload),
        ("--fault", options.fault),
        ("--steps", options.steps),
        ("--kernels", options.kernels),
        ("--device", options.device),
    ):
        if value:
            flags += [name, str(value)]
    return flags
