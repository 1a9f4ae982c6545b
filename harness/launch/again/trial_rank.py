"""One rank that runs a failing step again and again, with changes. Nothing here judges."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from sumgrad.base.memory import keep_freed_memory
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.rank import local_group
from sumgrad.record.spec import read_spec
from sumgrad.record.trial import add_trial, read_asked
from sumgrad.subjects.program.job import UserStep
from sumgrad.subjects.program.tried.kept_from import with_less_memory
from sumgrad.subjects.program.tried.trials import Agreement

MOST_MORE = 4 << 30  # bytes: other code may ask for as much as it likes


def trial_rank(guard: RankGuard) -> dict[str, Any]:
    """One rank of it."""
    keep_freed_memory()
    with_less_memory(MOST_MORE)
    folder, rank = guard.env.directory, guard.env.rank
    asked, values = read_asked(folder)
    place = guard.env.rendezvous.with_name("agreement")
    with local_group(guard) as ledger:
        store = dist.FileStore(str(place), guard.env.world_size)  # type: ignore[attr-defined]
        step = UserStep(read_spec(folder.parent))
        over = place.with_name("over")
        agreement = Agreement(store, rank, guard.env.world_size, over)
        for one in step.try_rank(rank, ledger, asked, values, agreement):
            if rank == 0:
                add_trial(folder, one)
    return {}
