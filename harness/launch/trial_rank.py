"""One rank that runs a failing step again and again, with changes. Nothing here judges."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from sumgrad.base.memory import keep_freed_memory
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.rank import local_group
from sumgrad.record.spec import read_spec
from sumgrad.record.trial import Trial, read_asked, write_trials
from sumgrad.subjects.program.job import UserStep


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
