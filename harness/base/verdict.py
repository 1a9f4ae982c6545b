"""Verdict: PASS < UNKNOWN < FAIL, merged by the worst. Merging nothing is UNKNOWN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["pass", "unknown", "fail"]
Standing = Literal["proved", "likely", "open"]
_ORDER: tuple[Status, ...] = ("pass", "unknown", "fail")
EXIT_CODES: dict[Status, int] = {"pass": 0, "fail": 1, "unknown": 3}
EXIT_USAGE, EXIT_INTERNAL = 2, 4


def merge(statuses: Iterable[Status]) -> Status:
    """The worst of them; UNKNOWN if there is none, because then nothing was compared."""
    found = list(statuses)
    return max(found, key=_ORDER.index) if found else "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredCoefficient:
    """How often a term landed in some parameters. recovered is None where the data cannot tell."""

    params: str
    ranks: tuple[int, ...]
    term: str
    producer: str
    rows: tuple[int, int] | None
    expected: str
    recovered: float | None
    sigma: float | None
    fraction: str | None
    identifiable: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "identifiable", self.recovered is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause in words, with its evidence. also: other readings of the same numbers.

    standing: `proved` where it predicts the measured gradients within their thresholds and the
    record shows it, or where the record itself is the proof; `likely` where one of the two is
    lacking; `open` where it says no more than where to look.
    """

    cause: str
    kind: str
    term: str | None = None
    ranks: tuple[int, ...] = ()
    factor: str | None = None
    symbol: str | None = None
    also: tuple[str, ...] = ()
    because: tuple[str, ...] = ()
    however: tuple[str, ...] = ()
    standing: Standing = "likely"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierVerdict:
    """One tier. worst_rel: max|dist - ref| / max|ref| over all tensors and ranks."""

    name: str
    dtype: str
    status: Status
    worst_rel: float | None = None
    worst_tensor: str | None = None
    worst_of_threshold: float | None = None
    median_of_threshold: float | None = None
    worst_rel_same_dtype: float | None = None
    worst_l2_rel_same_dtype: float | None = None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verdict:
    """The judgement of one run, with everything a report shows. `data` is verdict.json."""

    status: Status
    tiers: tuple[TierVerdict, ...]
    diagnoses: tuple[Diagnosis, ...]
    coefficients: tuple[RecoveredCoefficient, ...]
    findings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Short enough for a failed assert: the status and what explains it."""
        texts = [*(d.cause for d in self.diagnoses), *self.findings, *self.reasons]
        return f"<{self.status.upper()}{': ' + texts[0] if texts else ''}>"

    def __bool__(self) -> bool:
        """Whether it is a PASS, so that `assert sumgrad_check(...)` is what it seems."""
        return self.status == "pass"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.status]

    def assert_pass(self) -> Verdict:
        """Itself where it is a PASS; else AssertionError with the cause and how to run it again."""
        if self.status == "pass":
            return self
        lines = [f"{self.status.upper()}: {self.data.get('workload', 'the check')}"]
        for d in self.diagnoses[:1]:
            standing = f"{d.standing}: " if d.standing else ""
            lines += [f"cause: {standing}{d.cause}", *(f"because: {text}" for text in d.because)]
        lines += [*self.findings, *self.reasons, *self.warnings]
        if again := self.data.get("reproduce"):
            lines.append(f"again: {again}")
        raise AssertionError("\n".join(dict.fromkeys(lines)))
