"""A Program as a subject: a user's own step, its reference, and the look at it before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sumgrad.base.errors import Broken, UserError
from sumgrad.ledger.process_group import Ledger
from sumgrad.record.adjoint import Adjoint
from sumgrad.record.ranks import RankFiles
from sumgrad.record.reference import Grads, Parts, Reference
from sumgrad.record.spec import Facts, RunSpec
from sumgrad.record.trace import Trace
from sumgrad.record.trial import Asked, Trial, Values
from sumgrad.subjects.program.probe import broken_facts, probe
from sumgrad.subjects.program.protocol import make_program
from sumgrad.subjects.program.rank import Rank
from sumgrad.subjects.program.reference.compute import compute_program_reference
from sumgrad.subjects.program.reference.parts import compute_parts
from sumgrad.subjects.program.reference.terms import JITTERS, MORE_JITTERS
from sumgrad.subjects.program.reference.trace import trace_reference
from sumgrad.subjects.program.tried.trials import Agreement
from sumgrad.subjects.subject import Progress
from sumgrad.topology.pools import Topology

TellsAdjoints = Callable[[Iterable[Mapping[str, Any]]], Iterator[Adjoint]]


class UserStep:
    """A Program on the ranks of a spec."""

    def __init__(self, spec: RunSpec) -> None:
        file, colon, name = spec.workload.rpartition(":")
        if file.endswith(".py"):  # found again, also from a folder that a step has changed to
            spec = replace(spec, workload=f"{Path(file).absolute()}{colon}{name}")
        self.spec = spec

    def run_rank(self, rank: int, ledger: Ledger, files: RankFiles) -> Mapping[str, Any]:
        return self._rank(rank, ledger).run(self.spec, files)

    def _rank(self, rank: int, ledger: Ledger) -> Rank:
        return Rank(self.spec.topology, rank, ledger, self.spec.device)

    def pieces(self) -> list[str]:
        return [f"step {step}" for step in range(self.spec.steps)]

    def references(self, piece: str, *, progress: Progress) -> Iterator[tuple[str, Reference]]:
        """Every tier of one step. Raises Broken where loss_sum does."""
        step = int(piece.removeprefix("step "))
        yield from self._references(step, JITTERS, progress).items()

    def bits(self) -> Iterator[tuple[int, Grads, Sequence[str]]]:
        return iter(())  # no plan says by which trees it sums

    def surer_references(self, step: int, *, progress: Progress) -> dict[str, Reference]:
        """The same, of more runs. Raises Broken where loss_sum does."""
        return self._references(step, MORE_JITTERS, progress)

    def _references(self, step: int, jitters: int, progress: Progress) -> dict[str, Reference]:
        spec = self.spec
        assert spec.facts is not None
        with _named():
            return compute_program_reference(
                make_program(spec.workload, spec.topology, seed=spec.seed),
                spec.facts,
                self._tiers(),
                step=step,
                num_steps=spec.steps,
                num_chunks=max(pool.size for pool in spec.topology.pools),
                lift=spec.lift,
                jitters=jitters,
                ranks_on=spec.device,
                progress=progress,
            )

    def parts(self, tier: str, step: int, known: Sequence[Reference]) -> dict[int, Parts]:
        """Row by row, of the terms whose rows add up. Raises Broken where loss_sum does."""
        spec = self.spec
        assert spec.facts is not None
        with _named():
            program = make_program(spec.workload, spec.topology, seed=spec.seed)
            return {
                at: compute_parts(program, spec.facts, self._tiers(), known[at], lift=spec.lift)
                for at in (step - 1, step)
                if at >= 0
            }

    def trace_rank(
        self, rank: int, ledger: Ledger, tier: str, step: int
    ) -> tuple[Trace, TellsAdjoints]:
        """What goes through the modules of a rank in one step; and what tells, given the events of
        its ledger and called on all ranks, of Functions that communicate."""
        own = self._rank(rank, ledger)
        return own.trace(self.spec, tier, step), own.adjoints

    def try_rank(
        self, rank: int, ledger: Ledger, asked: Asked, values: Values, agreement: Agreement
    ) -> Iterator[Trial]:
        """A failing step again with changes in it, on a rank; all ranks together."""
        return self._rank(rank, ledger).tries(self.spec, asked, values, agreement)

    def trace_single(self, tier: str, step: int) -> Trace:
        """The same in one process, over the full batch. Raises Broken where loss_sum does."""
        spec = self.spec
        assert spec.facts is not None
        with _named():
            program = make_program(spec.workload, spec.topology, seed=spec.seed)
            return trace_reference(
                program, spec.facts, self._tiers(), tier=tier, step=step, lift=spec.lift
            )

    def _tiers(self) -> dict[str, torch.dtype]:
        return {tier: getattr(torch, dtype) for tier, dtype in self.spec.tiers.items()}


@contextmanager
def _named() -> Iterator[None]:
    """What a Program's own code raises, as what it is."""
    try:
        yield
    except (UserError, Broken):
        raise
    except Exception as error:
        raise Broken(f"loss_sum() raised {type(error).__name__}: {error}") from error


def look_here(topology: Topology, name: str, seed: int, lift: bool = True) -> Facts:
    """Look at a Program in this process."""
    try:
        return probe(make_program(name, topology, seed=seed), lift=lift)
    except UserError as error:
        return broken_facts(str(error))
