"""A failing step of a user's own again and again, each time with one thing done otherwise."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from sumgrad.base.errors import LaunchError
from sumgrad.base.time_limit import time_limit
from sumgrad.diagnose.trials import asked_again, changes_to_try, edited_to_try
from sumgrad.launch.again.one_rank import OnOneRank
from sumgrad.launch.local.launcher import Launcher, RankJob, start_of
from sumgrad.record.directory import Record
from sumgrad.record.trial import (
    TRIALS,
    Asked,
    Change,
    Values,
    finish_trials,
    read_trials,
    write_asked,
)

TRYING = "trying what would make it right"  # the phase, as it is shown
START_S, LEAST_S = 0.6, 0.5  # of ranks, until they try; for trials at least
MOST_LOOKING_S = 5.0  # for what may be tried
EDITS_S, MOST_EDITS_S = 4.0, 9.0  # for edits of the code, at least; where there is time left
MOST_STARTS = 4  # of ranks, which one may make end
LATE_S = 25.0  # for ranks to start, and to see that one is stuck


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """made: whether anything was tried. left: how many changes time was too short for, where none
    of those that were made is a cause."""

    made: bool = False
    left: int = 0


def try_changes(
    record: Record,
    tier: str,
    step: int,
    seconds: float,
    said: str,
    *,
    launcher: Launcher,
    progress: Callable[[str], object],
    asked_s: float | None = None,
    alone: OnOneRank | None = None,
    edits_only: bool = False,
) -> Tried:
    """What came of it lies in the record's directory. seconds: for all of it, so far as a few
    trials fit. said: of the cause. asked_s: so long instead, as who runs it asks for. alone: the
    step on one rank, where many more are tried in the same time. edits_only: the cause is known,
    and not where in the code it is."""
    if asked_s is not None and asked_s < LEAST_S:
        return Tried()
    ended = alone.ended if alone is not None else None
    failed = ended if ended is not None and ended.fails else None
    trying, began = _Trying(record, launcher, progress), time.monotonic()
    by = began + (seconds if asked_s is None else asked_s)
    # What is asked for is shared with edits, of which there are more.
    first = max(seconds - START_S, LEAST_S) if asked_s is None else asked_s / 3
    if failed is not None and failed.right:
        right = _looked_for(partial(asked_again, record, tier, step, failed.right, seconds=EDITS_S))
        if right is not None:
            trying.run(*right)
            if trying.is_known():
                return Tried(made=True)
    every: list[Change] = []
    if not edits_only:
        looks = partial(changes_to_try, record, tier, step, seconds=first, said=said)
        changes = _looked_for(looks)
        if changes is not None:
            trying.run(*changes)
            every += changes[0].changes
        if trying.is_known():
            return Tried(made=True)
    look = partial(edited_to_try, record, tier, step, seconds=EDITS_S, said=said, alone=edits_only)
    late, wrong = trying.is_late, frozenset() if failed is None else failed.wrong
    order = _whether_of_the_set_up(record, edits_only=edits_only)
    for num, set_up in enumerate(order):
        edits = _looked_for(partial(look, set_up=set_up))
        edits = None if edits is None else _without(wrong, *edits)
        if edits is None:
            continue
        now = time.monotonic()
        if asked_s is not None:  # all that is left, or half of it
            until = by if num == len(order) - 1 else (now + by) / 2
        else:
            least = edits_only or set_up
            until = now + (EDITS_S if least else min(max(EDITS_S, by - now), MOST_EDITS_S))
        trying.run_again(*edits, until, max(MOST_STARTS, int(asked_s or 0)))
        every += edits[0].changes
        late |= trying.is_late
        if trying.is_known():
            return Tried(made=True)
    every += _within_what_was_avoided(
        trying, look, said, time.monotonic() + EDITS_S if asked_s is None else by
    )
    return Tried(made=bool(every), left=len(trying.not_begun(every)) if late else 0)


def _within_what_was_avoided(
    trying: _Trying, look: Callable[..., tuple[Asked, Values] | None], said: str, until: float
) -> Sequence[Change]:
    """Edits of functions without which the step was right, until then; which they were."""
    avoided = trying.avoided()
    names = " ".join(name.rpartition(" ")[0] for name in avoided)
    edits = _looked_for(partial(look, said=f"{said} {names}")) if avoided else None
    if edits is None:
        return ()
    trying.run_again(*edits, until, MOST_STARTS)
    return edits[0].changes


def _whether_of_the_set_up(record: Record, *, edits_only: bool) -> tuple[bool, ...]:
    """In which order edits of the step, and of what distributes, are tried."""
    if record.spec.topology.world_size == 1:
        return (False,)  # nothing is cut there
    return (True, False) if edits_only else (False, True)


def _without(changes: Set[Change], asked: Asked, values: Values) -> tuple[Asked, Values] | None:
    """The same without these, as what leaves one rank wrong leaves many so; None for none."""
    left = tuple(change for change in asked.changes if change not in changes)
    return (replace(asked, changes=left), values) if left else None


def _looked_for(what: Callable[[], tuple[Asked, Values] | None]) -> tuple[Asked, Values] | None:
    try:
        with time_limit(MOST_LOOKING_S):
            return what()
    except Exception:  # an error of ours takes no verdict away
        return None


class _Trying:
    """Ranks that are started for changes, until all were tried, or one makes them end.

    is_late: whether the last ones ended for want of time.
    """

    def __init__(
        self, record: Record, launcher: Launcher, progress: Callable[[str], object]
    ) -> None:
        self._record, self._launcher, self._progress = record, launcher, progress
        self._begun: set[Change] = set()
        self._stuck: list[str] = []
        self.is_late = False

    def is_known(self) -> bool:
        """Whether something makes it right that is a cause, or an edit does: one is enough. Not one
        that only has a function not run in which what is wrong may be."""
        right = [one for one in read_trials(self._record.directory) if one.right]
        return any((a.change.sure or a.change.edit is not None) and not a.avoids for a in right)

    def avoided(self) -> tuple[str, ...]:
        """Functions that the step does not run, where it was made right so."""
        made = read_trials(self._record.directory)
        return tuple(dict.fromkeys(name for one in made if one.right for name in one.avoids))

    def not_begun(self, changes: Sequence[Change]) -> list[Change]:
        """Those of them that no rank has begun with."""
        return [change for change in changes if change not in self._begun]

    def run_again(self, asked: Asked, values: Values, until: float, starts: int) -> None:
        """All of them, with ranks for those that ranks before them did not come to."""
        for _ in range(starts):
            left = until - time.monotonic()
            if left < LEAST_S or self._begun.issuperset(asked.changes) or self.is_known():
                return
            self.run(replace(asked, seconds=left), values)

    def run(self, asked: Asked, values: Values) -> None:
        """Those that were not tried yet, so far as ranks come."""
        record = self._record
        left, began = self.not_begun(asked.changes), time.monotonic()
        # What is at a line at which ranks waited for each other for ever may well do so, too.
        left.sort(key=lambda change: change.site in self._stuck)
        asked = replace(asked, changes=tuple(left))
        folder, topology = record.directory / TRIALS, record.spec.topology
        with contextlib.suppress(FileExistsError):
            (folder / "ranks").mkdir(parents=True)
        self._progress(TRYING)
        num_ranks, before = topology.world_size, len(read_trials(record.directory))
        job = RankJob(
            target="sumgrad.launch.again.trial_rank:trial_rank",
            num_ranks=num_ranks,
            directory=folder,
            pools=[topology.pool_of(r).name for r in range(num_ranks)],
            timeout_s=min(record.spec.timeout_s, asked.seconds + LATE_S),
            start=start_of(record.spec),
        )
        write_asked(folder, asked, values)
        with contextlib.suppress(LaunchError):  # one that ends badly has told what was before it
            self._launcher.run(job, progress=self._progress)
        self.is_late = time.monotonic() - began >= asked.seconds
        finish_trials(folder)
        made = len(read_trials(record.directory)) - before
        self._begun.update(left[: made + 1])  # and the one that made them end
        self._stuck += [change.site for change in left[made : made + 1]]
