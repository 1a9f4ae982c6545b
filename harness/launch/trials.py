"""A failing step of a user's own again and again, each time with one thing done otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from sumgrad.base.errors import LaunchError
from sumgrad.base.time_limit import time_limit
from sumgrad.diagnose.trials import changes_to_try
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.record.directory import Record
from sumgrad.record.trial import TRIALS, finish_trials, write_asked

TRYING = "trying what would make it right"  # the phase, as it is shown
START_S, LEAST_S = 0.6, 0.5  # of ranks, until they try; for trials at least
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
        target="sumgrad.launch.trial_rank:trial_rank",
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
