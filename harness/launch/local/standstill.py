"""Will the ranks of a job ever go on? Told from their ledgers and the state of their processes.

Three ways to know that they will not, each a little slower and less sure than the one before: they
wait for each other in operations that can never meet; all of them stand in operations; some stand
in an operation and all others sleep, without computing anything, or have been stopped. A rank that
computes, however slowly, or waits for a disk, is none of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sumgrad.launch.local.processes import children_of, seconds_wanted, state_of
from sumgrad.ledger.operations import disagreement_of
from sumgrad.record.endings import rank_file, read_ledger, stands_in_operation

STANDSTILL_S = 10.0
DISAGREEMENT_S = 1.0  # between two looks at the ledgers of ranks that stand still
ASLEEP_S, STOPPED_S = 60.0, 5.0
# Of that time, for which a sleeping process may want a processor: threads that look at clocks and
# sockets take 1 %. Where others take the processors, waiting for one counts too.
LITTLE, LITTLE_S = 0.04, 0.1
LOOK_S = 1.0  # between two looks at what ranks do


class Watched(Protocol):
    """A rank's process. exit_code: None while it lives."""

    rank: int
    pid: int
    exit_code: int | None


@dataclass(slots=True)
class Standstill:
    """What was seen of one job. place: directory and number of a rank's record. asleep_s: for how
    long all others may sleep while one waits."""

    place: Callable[[int], tuple[Path, int]]
    asleep_s: float = ASLEEP_S
    # When the ledgers were looked at, their bytes, the seconds for which ranks wanted a processor.
    _window: tuple[float, int, dict[int, float]] = field(default=(0.0, -1, {}))
    _quiet: tuple[float, int] = (0.0, -1)
    _looked: float = 0.0
    _asleep: tuple[float, int, dict[int, float]] = field(default=(0.0, -1, {}))

    def is_final(self, ranks: Sequence[Watched], now: float) -> bool:
        """Whether they will not go on. Ask as often as you like."""
        return self._stands(ranks, now) or self._disagrees(ranks, now) or self._sleeps(ranks, now)

    def _stands(self, ranks: Sequence[Watched], now: float) -> bool:
        """Whether for a while every rank has stood in an operation, and none issued another, or
        computed: one that is issued, and not waited for yet, holds nobody up."""
        since, before, wanted = self._window
        if now < since + STANDSTILL_S:
            return False
        living = _living(ranks)
        written = sum(self._bytes(rank) for rank in living)
        told = {rank.rank: activity(rank.pid)[1] for rank in living}
        self._window = now, written, told
        most = LITTLE_S + LITTLE * (now - since)
        idle = all(total - wanted.get(rank, total) <= most for rank, total in told.items())
        return since > 0 and written == before and idle and all(map(self._in_operation, living))

    def _disagrees(self, ranks: Sequence[Watched], now: float) -> bool:
        """Whether nothing was written for a moment, and ranks can never meet in what they issued.

        Two members of a group issued different operations, or one ended well without issuing what
        another one stands in.
        """
        since, before = self._quiet
        if now < since + DISAGREEMENT_S:
            return False
        self._quiet = now, sum(self._bytes(rank) for rank in ranks)
        quiet = since > 0 and self._quiet[1] == before and len(ranks) > 1
        if not quiet or not any(map(self._in_operation, _living(ranks))):
            return False
        ledgers = {rank.rank: list(read_ledger(self._ledger(rank))) for rank in ranks}
        ended = {rank.rank for rank in ranks if rank.exit_code is not None}
        return any(d.mismatch or ended & set(d.absent) for d in disagreement_of(ledgers))

    def _sleeps(self, ranks: Sequence[Watched], now: float) -> bool:
        """Whether all that stand in no operation have slept for long, or are stopped."""
        if now < self._looked + LOOK_S:
            return False
        self._looked = now
        since, before, wanted = self._asleep
        written = sum(self._bytes(rank) for rank in ranks)
        told = {rank.rank: activity(rank.pid) for rank in _living(ranks)}
        busy = any(states - {"S", "T"} for states, _ in told.values())
        most = LITTLE_S + LITTLE * (now - since)
        worked = any(not total - wanted.get(rank, 0.0) <= most for rank, (_, total) in told.items())
        if busy or worked or written != before or told.keys() != wanted.keys():
            self._asleep = now, written, {rank: total for rank, (_, total) in told.items()}
            return False
        stopped = any("T" in states for states, _ in told.values())
        if now < since + (STOPPED_S if stopped else self.asleep_s):
            return False
        waiting = [self._in_operation(rank) for rank in _living(ranks)]
        return any(waiting) and not all(waiting)

    def _in_operation(self, rank: Watched) -> bool:
        return stands_in_operation(self._ledger(rank))

    def _bytes(self, rank: Watched) -> int:
        try:
            return self._ledger(rank).stat().st_size
        except OSError:
            return 0

    def _ledger(self, rank: Watched) -> Path:
        return rank_file(*self.place(rank.rank), ".ledger.jsonl")


def activity(pid: int) -> tuple[set[str], float]:
    """The states of a process and of all below it, and the seconds for which they have wanted a
    processor. What is not known counts as busy."""
    states, seconds = {state_of(pid)}, seconds_wanted(pid)
    for child in children_of(pid):
        more, others = activity(child)
        states, seconds = states | more, seconds + others
    return states, seconds


def _living(ranks: Sequence[Watched]) -> list[Watched]:
    return [rank for rank in ranks if rank.exit_code is None]
