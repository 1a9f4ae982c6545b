"""A failing step of a user's own again and again, each time with one thing done otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sumgrad.base.errors import LaunchError
from sumgrad.base.time_limit import time_limit
from sumgrad.diagnose.trials import changes_to_try, edited_to_try
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.record.directory import Record
from sumgrad.record.reference import Grads
from sumgrad.record.trial import TRIALS, Asked, Change, finish_trials, read_trials, write_asked

TRYING = "trying what would make it right"  # the phase, as it is shown
START_S, LEAST_S = 0.6, 0.5  # of ranks, until they try; for trials at least
MOST_LOOKING_S = 5.0  # for what may be tried
EDITS_S, MOST_EDITS_S = 4.0, 9.0  # for edits of the code, at least; where there is time left
MOST_STARTS = 4  # of ranks, which one may make end
LATE_S = 25.0  # for ranks to start, and to see that one is stuck


def try_changes(
    record: Record,
    tier: str,
    step: int,
    seconds: float,
    said: str,
    *,
    launcher: Launcher,
    progress: Callable[[str], object],
) -> bool:
    """Whether anything was tried; what came of it lies in the record's directory. seconds: for all
    of it, so far as a few trials fit. said: of the cause."""
    trying, by = _Trying(record, launcher, progress), time.monotonic() + seconds
    first = max(seconds - START_S, LEAST_S)
    changes = _looked_for(partial(changes_to_try, record, tier, step, seconds=first, said=said))
    if changes is not None:
        trying.run(*changes)
    if trying.is_known():
        return True
    edits = _looked_for(partial(edited_to_try, record, tier, step, seconds=EDITS_S, said=said))
    if edits is not None:
        now = time.monotonic()
        trying.run_again(*edits, now + min(max(EDITS_S, by - now), MOST_EDITS_S))
    return changes is not None or edits is not None


def _looked_for(what: Callable[[], tuple[Asked, Grads] | None]) -> tuple[Asked, Grads] | None:
    try:
        with time_limit(MOST_LOOKING_S):
            return what()
    except Exception:  # an error of ours takes no verdict away
        return None


class _Trying:
    """Ranks that are started for changes, until all were tried, or one makes them end."""

    def __init__(
        self, record: Record, launcher: Launcher, progress: Callable[[str], object]
    ) -> None:
        self._record, self._launcher, self._progress = record, launcher, progress
        self._begun: set[Change] = set()
        self._stuck: list[str] = []

    def is_known(self) -> bool:
        """Whether something makes it right that is a cause, or an edit does: one is enough."""
        right = [one.change for one in read_trials(self._record.directory) if one.right]
        return any(change.sure or change.edit is not None for change in right)

    def run_again(self, asked: Asked, wanted: Grads, until: float) -> None:
        """All of them, with ranks for those that ranks before them did not come to."""
        for _ in range(MOST_STARTS):
            left = until - time.monotonic()
            if left < LEAST_S or self._begun.issuperset(asked.changes) or self.is_known():
                return
            self.run(replace(asked, seconds=left), wanted)

    def run(self, asked: Asked, wanted: Grads) -> None:
        """Those that were not tried yet, so far as ranks come."""
        record = self._record
        left = [change for change in asked.changes if change not in self._begun]
        # What is at a line at which ranks waited for each other for ever may well do so, too.
        left.sort(key=lambda change: change.site in self._stuck)
        asked = replace(asked, changes=tuple(left))
        folder, topology = record.directory / TRIALS, record.spec.topology
        with contextlib.suppress(FileExistsError):
            (folder / "ranks").mkdir(parents=True)
        self._progress(TRYING)
        num_ranks, before = topology.world_size, len(read_trials(record.directory))
        job = RankJob(
            target="sumgrad.launch.trial_rank:trial_rank",
            num_ranks=num_ranks,
            directory=folder,
            pools=[topology.pool_of(r).name for r in range(num_ranks)],
            timeout_s=min(record.spec.timeout_s, asked.seconds + LATE_S),
        )
        write_asked(folder, asked, wanted)
        with contextlib.suppress(LaunchError):  # one that ends badly has told what was before it
            self._launcher.run(job, progress=self._progress)
        finish_trials(folder)
        made = len(read_trials(record.directory)) - before
        self._begun.update(left[: made + 1])  # and the one that made them end
        self._stuck += [change.site for change in left[made : made + 1]]
