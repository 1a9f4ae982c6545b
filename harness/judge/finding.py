"""A finding, and what a check is: a function from a stored run to findings. Checks compose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from sumgrad.judge.comparison import TensorDiff
from sumgrad.plan.schedule import Mismatch
from sumgrad.record.directory import Record

# fail: the run is wrong. unknown: something was not seen. law: the law is broken though the
# gradients may be right; it fails where the law is enforced and warns elsewhere. warning: no more.
Level = Literal["fail", "unknown", "law", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found. tier: where it belongs to one; `aside`: shown with the tier only."""

    level: Level
    text: str
    tier: str | None = None
    aside: bool = False


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A stored run, and its gradients compared. again: those of a step that was repeated.

    mismatches: where the ledgers differ from the plan.
    """

    record: Record
    diffs: Sequence[TensorDiff]
    again: Sequence[TensorDiff]
    mismatches: Sequence[Mismatch]

    @property
    def failed_again(self) -> list[TensorDiff]:
        """What failed in the repeated step, and passed in every step before."""
        return [
            d
            for d in self.again
            if d.status == "fail" and (d.tier, d.rank, d.name) not in self.not_passed
        ]

    @cached_property
    def not_passed(self) -> set[tuple[str, int, str]]:
        """Tier, rank and name of what did not pass in every step."""
        return {(d.tier, d.rank, d.name) for d in self.diffs if d.status != "pass"}


Check = Callable[[Compared], Iterator[Finding]]
