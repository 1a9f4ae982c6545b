"""A failing step of a user's own once more, with eyes on its modules: ranks, and one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sumgrad.base.files import write_json
from sumgrad.base.memory import keep_freed_memory
from sumgrad.base.outcome import first_to_fail
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.local.launcher import Helper, Launcher, RankJob, start_of
from sumgrad.launch.rank import local_group
from sumgrad.record.adjoint import Adjoint, write_adjoints
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
        target="sumgrad.launch.again.trace:trace_rank",
        arguments=asked,
        num_ranks=num_ranks,
        directory=folder,
        pools=[spec.topology.pool_of(r).name for r in range(num_ranks)],
        helpers=[Helper(target="sumgrad.launch.again.trace:trace_helper", arguments=asked)],
        timeout_s=spec.timeout_s,
        helper_patience=3,
        start=start_of(spec),
    )
    bad = [outcome for outcome in launcher.run(job, progress=progress) if not outcome.ok]
    if not bad or _is_whole(folder, num_ranks):
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
        found, adjoints = UserStep(spec).trace_rank(rank, ledger, tier, step)
        found = write_with_operations(folder, rank, found)
        told: list[Adjoint] = []
        for one in adjoints(found.events):  # a user's forwards out of their step may end anyhow
            told.append(one)
            write_adjoints(folder, rank, told)
    return {}


def _is_whole(folder: Path, num_ranks: int) -> bool:
    """Whether every process has written its trace, whatever came after that."""
    paths = [single_trace(folder), *(rank_trace(folder, rank) for rank in range(num_ranks))]
    return all(path.with_suffix(".json").exists() for path in paths)


def write_with_operations(folder: Path, rank: int, found: Trace) -> Trace:
    """A rank's trace, with what its ledger in the same folder says that it issued meanwhile."""
    ledger = read_ledger(rank_file(folder, rank, ".ledger.jsonl"))
    found = with_operations(found, ledger)
    write_trace(rank_trace(folder, rank), found)
    return found


def trace_helper(guard: RankGuard, *, tier: str, step: int) -> None:
    """The single process of it."""
    keep_freed_memory()
    folder = guard.env.directory.parent
    write_trace(single_trace(folder), UserStep(read_spec(folder.parent)).trace_single(tier, step))
