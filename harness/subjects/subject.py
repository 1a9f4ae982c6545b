"""Subject: what is checked. It runs a step on a rank, and gives a reference in one process.

A kind of subject is a class with these methods, and a line in `subject_of`; what it knows of itself
goes into RunSpec, where checks and explainers ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from sumgrad.ledger.process_group import Ledger
from sumgrad.record.reference import Partials, Reference
from sumgrad.record.spec import RunSpec

Progress = Callable[[str], None]


class Subject(Protocol):
    """What is checked, made from what was asked."""

    def run_rank(self, rank: int, ledger: Ledger) -> tuple[Mapping[str, torch.Tensor], Any]:
        """Every tier and step on one rank of an initialised default group.

        Returns tensors as `record.ranks.write_rank` takes them, and what goes into the end record.
        """

    def references(self, tier: str, *, progress: Progress) -> list[Reference]:
        """One tier's reference of every step, in this process."""

    def partials(self, tier: str, step: int) -> dict[int, Partials] | None:
        """The partials of a step and of the one before it, where references hold none yet."""


def subject_of(spec: RunSpec) -> Subject:
    """The subject that a spec asks for. Raises UserError where it cannot be loaded."""
    if spec.declaration is not None:
        from sumgrad.subjects.planned.job import PlannedStep

        return PlannedStep(spec)
    from sumgrad.subjects.program.job import UserStep

    return UserStep(spec)
