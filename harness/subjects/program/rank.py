"""What one rank does with a Program, tier after tier, and what it records.

The last step of the last tier, the cheapest, is run once more: the same weights must give the same
gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from sumgrad.base.devices import take_device
from sumgrad.base.memory import give_back_memory
from sumgrad.base.outcome import SETUP
from sumgrad.ledger.aside import without_operations
from sumgrad.ledger.process_group import Ledger
from sumgrad.record.adjoint import Adjoint
from sumgrad.record.ranks import RankFiles
from sumgrad.record.spec import RunSpec
from sumgrad.record.trace import Trace
from sumgrad.record.trial import Asked, Trial, Values
from sumgrad.subjects.exchanges import Exchanges
from sumgrad.subjects.own_gradients import Losses
from sumgrad.subjects.program.context import Seat, make_meshes, of_all_ranks
from sumgrad.subjects.program.functions.adjoints import Adjoints
from sumgrad.subjects.program.functions.applied import Applied
from sumgrad.subjects.program.held_gradients import own_gradients_of
from sumgrad.subjects.program.placed.renamed import names_of_modules
from sumgrad.subjects.program.tier_run import Result, TierRun
from sumgrad.subjects.program.tried.trials import Agreement, Trials
from sumgrad.subjects.program.watched.computations import computations_beside
from sumgrad.subjects.program.watched.names_in_scope import NamesInScope
from sumgrad.subjects.program.watched.uses import Uses
from sumgrad.subjects.program.watched.watch import ModuleWatch
from sumgrad.topology.pools import Topology


class Rank:
    """One rank and its meshes; runs jobs one after the other on the same process group."""

    def __init__(self, topology: Topology, rank: int, ledger: Ledger, device: str = "cpu") -> None:
        """device: "cpu" or "cuda"."""
        self.rank, self.ledger = rank, ledger
        own = take_device(device)
        with ledger.label(f"{SETUP}/meshes"):
            meshes = make_meshes(topology, own)
        self._seat = Seat(topology=topology, rank=rank, ledger=ledger, meshes=meshes, device=own)
        self._applied: list[Applied] = []

    def run(self, job: RunSpec, files: RankFiles, *, again: bool = True) -> Result:
        """All tiers and steps; returns what goes into the end record.

        files: where tensors go as they come. again: repeat the last step of the last tier.
        """
        result: Result = {"steps": [], "unknown": [], "params": {}}
        for i, (tier, dtype) in enumerate(job.tiers.items()):
            run = TierRun(self._seat, job, tier, getattr(torch, dtype))
            try:
                run.steps(files, result, again=again and i == len(job.tiers) - 1)
            finally:
                run.close()
            del run
            give_back_memory()
        result["operations"] = self.ledger.num_operations
        return result

    def adjoints(self, events: Iterable[Mapping[str, Any]]) -> Iterator[Adjoint]:
        """Of calls of the step that was traced last, which all ranks run again together. events: of
        its ledger."""
        with self.ledger.label(f"{SETUP}/adjoints"):
            yield from Adjoints(self._applied, events, self.rank, of_all_ranks).found()

    def tries(
        self, job: RunSpec, asked: Asked, values: Values, agreement: Agreement
    ) -> Iterator[Trial]:
        """A failing step, so or so; all ranks together."""
        job = replace(job, lift=job.lift and asked.lift)  # to look for casts takes as long again
        run = TierRun(self._seat, job, asked.tier, getattr(torch, job.tiers[asked.tier]))
        try:
            with self.ledger.label(f"{SETUP}/trials"):
                yield from Trials(run, asked, values, agreement).found()
        finally:
            run.close()

    def trace(self, job: RunSpec, tier: str, step: int) -> Trace:
        """What goes through the modules in one step, after those before it."""
        set_up, dtype = NamesInScope(), getattr(torch, job.tiers[tier])
        run = TierRun(self._seat, job, tier, dtype, set_up.of_all_that_ends)
        try:
            exchanges = Exchanges(self.ledger, run.watch.observe)
            run.observe = exchanges.observe
            for before in range(step):
                exchanges.begin_step()
                run.step(before)
            exchanges.begin_step()
            names = names_of_modules(run.model, run.modules, run.placement)
            seen = ModuleWatch(run.model, names, lambda: self.ledger.num_operations, with_ways=True)
            computations = computations_beside(seen)
            own_gradients = own_gradients_of(run.model, run.placement.placed)
            with seen, Losses(seen.at_loss) as losses, own_gradients as own, computations:
                uses = Uses(own)
                computations.begins = uses.begin
                run.step(step)
            gave, at = own.taken(p.name for p in run.placement.placed)
            with without_operations(self.ledger):
                computed = computations.computed()
            self._applied = [*computations.derivatives.calls()]
            return replace(
                seen.trace(),
                own=gave,
                own_at=at,
                own_lines=own.lines(),
                uses=uses.taken(),
                losses=tuple(losses.values),
                computed=replace(computed, set_up=set_up.found()),
                exchanges=exchanges.found,
            )
        finally:
            run.close()
