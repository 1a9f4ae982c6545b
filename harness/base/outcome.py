"""RankOutcome: what became of one rank. Exactly one for every rank, whatever happened to it."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

MAX_NAMED = 3
IN_WORKERS = " in another process, as a DataLoader's workers are,"  # behind a line that draws
TRIES_ON = "--search SECONDS tries for longer"  # what was not tried for want of time
SETUP = "setup"  # ledger label of what a launcher does before the first step
Status = Literal["ok", "raised", "killed", "timed_out", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """status: ok, raised (an exception), killed (a signal), timed_out, missing (no word of it).

    detail: one line for the report. waiting_in: the operation that had started and was not done.
    stack: traceback of the exception, or of where the rank stood. output: the tail of what it
    printed, when it did not end well. ended_at: seconds since the epoch, by the rank's own clock.
    by_launcher: it was killed by the launcher, because it did not end when it was asked to.
    """

    rank: int
    pool: str
    status: Status
    exit_code: int | None = None
    seconds: float | None = None
    detail: str | None = None
    waiting_in: str | None = None
    stack: str | None = None
    output: str | None = None
    ended_at: float | None = None
    by_launcher: bool = False

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def ended_from_outside(self) -> bool:
        """Ended by neither the launcher nor its own code: somebody or the kernel, or not known."""
        own = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGILL}
        killed = self.status == "killed" and not self.by_launcher and self.exit_code not in own
        return killed or (self.status == "missing" and self.exit_code is None)


def first_to_fail(outcomes: Sequence[RankOutcome]) -> RankOutcome:
    """The outcome that explains the others.

    Who died without a word; else who stands in no collective while others wait in theirs; else
    who failed first.
    """

    def order(o: RankOutcome) -> tuple[bool, bool, float]:
        dead = o.status in ("killed", "missing")
        return not dead, o.waiting_in is not None, o.ended_at or 0.0

    return min(outcomes, key=order)


def outcome_to_json(outcome: RankOutcome) -> dict[str, Any]:
    return asdict(outcome)


def outcome_from_json(data: Mapping[str, Any]) -> RankOutcome:
    fields: dict[str, Any] = {f: data[f] for f in RankOutcome.__dataclass_fields__ if f in data}
    return RankOutcome(**fields)


def in_digits(value: float) -> str:
    """A number that is no fraction, in nine digits; `1 - 4.2e-10` where these would hide it."""
    text, whole = f"{value:.9g}", round(value)
    if text != str(whole) or value == whole:
        return text
    return f"{whole} {'-' if value < whole else '+'} {abs(value - whole):.2g}"


def spans(values: Sequence[int]) -> str:
    """`0-3, 7` for [0, 1, 2, 3, 7]."""
    found: list[list[int]] = []
    for value in sorted(set(values)):
        if found and value == found[-1][1] + 1:
            found[-1][1] = value
        else:
            found.append([value, value])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def some_of(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def describe_operation(event: Mapping[str, Any] | None) -> str | None:
    """A ledger event in words: `allreduce(SUM) of 12 float64 over ranks 0-3 [edge], at a.py:9`."""
    if event is None:
        return None
    reduce = f"({event['reduce']})" if event.get("reduce") else ""
    peer = f" with rank {event['peer']}" if event.get("peer") is not None else ""
    label = f" [{event['label']}]" if event.get("label") else ""
    group = event["group"]
    ranks = group if isinstance(group, str) else spans(group)
    over = f" over ranks {ranks}" if not peer else ""
    what = f"{event['op']}{reduce} of {event['numel']} {event['dtype']}"
    return f"{what}{peer}{over}{label}, at {event['site']}"
