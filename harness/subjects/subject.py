"""Subject: what is checked. It runs a step on a rank, and gives a reference in one process.

A kind of subject is a class with these methods, and a line in `subject_of`; what it knows of itself
goes into RunSpec, where checks and explainers ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from sumgrad.ledger.process_group import Ledger
from sumgrad.record.ranks import RankFiles
from sumgrad.record.reference import Grads, Parts, Reference
from sumgrad.record.spec import RunSpec

Progress = Callable[[str], object]


class Subject(Protocol):
    """What is checked, made from what was asked."""

    def run_rank(self, rank: int, ledger: Ledger, files: RankFiles) -> Mapping[str, Any]:
        """Every tier and step on one rank of an initialised default group.

        Gradients are given to `files` as they come; returns what goes into the end record.
        """

    def pieces(self) -> list[str]:
        """What the reference is computed in: each piece in a process of its own."""

    def references(self, piece: str, *, progress: Progress) -> Iterator[tuple[str, Reference]]:
        """The references of a piece with their tiers, in this process."""

    def bits(self) -> Iterator[tuple[int, Grads, Sequence[str]]]:
        """What one process has in the bitwise tier: step, tensors by name, problems."""

    def surer_references(self, step: int, *, progress: Progress) -> dict[str, Reference]:
        """Every tier's reference of a step, its noise floor from more runs; none where it has them.

        Asked for before an error is called wrong that such runs may well make.
        """

    def parts(self, tier: str, step: int, known: Sequence[Reference]) -> dict[int, Parts]:
        """The parts of a step and of the one before it. known: the tier's references."""


def subject_of(spec: RunSpec) -> Subject:
    """The subject that a spec asks for. Raises UserError where it cannot be loaded."""
    if spec.declaration is not None:
        from sumgrad.subjects.planned.job import PlannedStep

        return PlannedStep(spec)
    from sumgrad.subjects.program.job import UserStep

    return UserStep(spec)
