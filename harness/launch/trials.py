"""A failing step of a user's own again and again, each time with one thing done otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from sumgrad.base.errors import LaunchError
from sumgrad.base.memory import keep_freed_memory
from sumgrad.base.time_limit import time_limit
from sumgrad.diagnose.trials import changes_to_try
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.launch.rank import local_group
from sumgrad.record.directory import Record
from sumgrad.record.spec import read_spec
from sumgrad.record.trial import TRIALS, Trial, finish_trials, read_asked, write_asked, write_trials
from sumgrad.subjects.program.job import UserStep

TRYING = "trying what would make it right"  # the phase, as it is shown
START_S, LEAST_S = 1.5, 1.5  # of ranks, until they try; for trials at least
MOST_LOOKING_S = 5.0  # for what may be tried
LATE_S = 25.0  # for ranks to start, and to see that one is stuck


def try_changes(
    record: Record,
    tier: str,
    step: int,
    seconds: float,
    *,
    launcher: Launcher,
    progress: Callable[[str], object],
) -> bool:
    """Whether anything was tried; what came of it lies in the record's directory. seconds: for all
    of it, so far as a few trials fit."""
    try:
        with time_limit(MOST_LOOKING_S):
            what = changes_to_try(record, tier, step, seconds=max(seconds - START_S, LEAST_S))
    except Exception:  # an error of ours takes no verdict away
        return False
    if what is None:
        return False
    asked, wanted = what
    folder, topology = record.directory / TRIALS, record.spec.topology
    with contextlib.suppress(FileExistsError):
        (folder / "ranks").mkdir(parents=True)
    progress(TRYING)
    num_ranks = topology.world_size
    job = RankJob(
        target="sumgrad.launch.trials:trial_rank",
        num_ranks=num_ranks,
        directory=folder,
        pools=[topology.pool_of(r).name for r in range(num_ranks)],
        timeout_s=min(record.spec.timeout_s, asked.seconds + LATE_S),
    )
    write_asked(folder, asked, wanted)
    with contextlib.suppress(LaunchError):  # one that ends badly has told what was tried before it
        launcher.run(job, progress=progress)
    finish_trials(folder)
    return True


def trial_rank(guard: RankGuard) -> dict[str, Any]:
    """One rank of it."""
    keep_freed_memory()
    folder, rank = guard.env.directory, guard.env.rank
    asked, wanted = read_asked(folder)
    told: list[Trial] = []
    place = guard.env.rendezvous.with_name("agreement")
    with local_group(guard) as ledger:
        store = dist.FileStore(str(place), guard.env.world_size)  # type: ignore[attr-defined]
        step = UserStep(read_spec(folder.parent))
        for one in step.try_rank(rank, ledger, asked, wanted, store):
            told.append(one)
            if rank == 0:
                write_trials(folder, told)
    return {}
