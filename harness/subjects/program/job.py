"""A Program as a subject: a user's own step, its reference, and the look at it before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sumgrad.base.errors import UserError
from sumgrad.ledger.process_group import Ledger
from sumgrad.record.reference import Partials, Reference
from sumgrad.record.spec import Facts, RunSpec
from sumgrad.subjects.program.probe import broken_facts, probe
from sumgrad.subjects.program.protocol import Broken, make_program
from sumgrad.subjects.program.rank import Rank
from sumgrad.subjects.program.reference import compute_program_reference
from sumgrad.subjects.subject import Progress
from sumgrad.topology.pools import Topology


class UserStep:
    """A Program on the ranks of a spec."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec

    def run_rank(self, rank: int, ledger: Ledger) -> tuple[Mapping[str, torch.Tensor], Any]:
        return Rank(self.spec.topology, rank, ledger).run(self.spec)

    def references(self, tier: str, *, progress: Progress) -> list[Reference]:
        """Raises Broken where loss_sum does."""
        spec = self.spec
        program = make_program(spec.workload, spec.topology, seed=spec.seed)
        assert spec.facts is not None
        try:
            return compute_program_reference(
                program,
                spec.facts,
                getattr(torch, spec.tiers[tier]),
                steps=spec.steps,
                num_chunks=max(pool.size for pool in spec.topology.pools),
                lift=spec.lift,
                progress=progress,
            )
        except (UserError, Broken):
            raise
        except Exception as error:
            raise Broken(f"loss_sum() raised {type(error).__name__}: {error}") from error

    def partials(self, tier: str, step: int) -> dict[int, Partials] | None:
        return None  # its references hold them


def look_here(topology: Topology, name: str, seed: int, lift: bool = True) -> Facts:
    """Look at a Program in this process."""
    try:
        return probe(make_program(name, topology, seed=seed), lift=lift)
    except UserError as error:
        return broken_facts(str(error))
