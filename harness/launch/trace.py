"""A failing step of a user's own once more, with eyes on its modules: ranks, and one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sumgrad.base.files import write_json
from sumgrad.base.memory import keep_freed_memory
from sumgrad.base.outcome import first_to_fail
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.local.launcher import Helper, Launcher, RankJob
from sumgrad.launch.rank import local_group
from sumgrad.record.endings import rank_file, read_ledger
from sumgrad.record.spec import RunSpec, read_spec
from sumgrad.record.trace import (
    FOLDER,
    Trace,
    rank_trace,
    single_trace,
    with_operations,
    write_trace,
)
from sumgrad.subjects.program.job import UserStep

LOOKING = "looking into the modules"  # the phase, as it is shown


def trace_step(
    directory: Path,
    spec: RunSpec,
    tier: str,
    step: int,
    *,
    launcher: Launcher,
    progress: Callable[[str], object],
) -> str | None:
    """Record what goes through the modules of one step. Returns why it could not be, if so."""
    folder = directory / FOLDER
    (folder / "ranks").mkdir(parents=True)
    asked: Mapping[str, Any] = {"tier": tier, "step": step}
    num_ranks = spec.topology.world_size
    progress(LOOKING)
    job = RankJob(
        target="sumgrad.launch.trace:trace_rank",
        arguments=asked,
        num_ranks=num_ranks,
        directory=folder,
        pools=[spec.topology.pool_of(r).name for r in range(num_ranks)],
        helpers=[Helper(target="sumgrad.launch.trace:trace_helper", arguments=asked)],
        timeout_s=spec.timeout_s,
        helper_patience=3,
    )
    bad = [outcome for outcome in launcher.run(job, progress=progress) if not outcome.ok]
    if not bad:
        write_json(folder / "asked.json", asked)
        return None
    first = first_to_fail(bad)
    return (
        f"the second run of the failing step, which looks into its modules, did not end well: rank "
        f"{first.rank} {first.status}: {first.detail}; the cause is told without it"
    )


def trace_rank(guard: RankGuard, *, tier: str, step: int) -> dict[str, Any]:
    """One rank of it."""
    keep_freed_memory()
    folder, rank = guard.env.directory, guard.env.rank
    spec = read_spec(folder.parent)
    with local_group(guard) as ledger:
        write_with_operations(folder, rank, UserStep(spec).trace_rank(rank, ledger, tier, step))
    return {}


def write_with_operations(folder: Path, rank: int, found: Trace) -> None:
    """A rank's trace, with what its ledger in the same folder says that it issued meanwhile."""
    ledger = read_ledger(rank_file(folder, rank, ".ledger.jsonl"))
    write_trace(rank_trace(folder, rank), with_operations(found, ledger))


def trace_helper(guard: RankGuard, *, tier: str, step: int) -> None:
    """The single process of it."""
    keep_freed_memory()
    folder = guard.env.directory.parent
    write_trace(single_trace(folder), UserStep(read_spec(folder.parent)).trace_single(tier, step))
