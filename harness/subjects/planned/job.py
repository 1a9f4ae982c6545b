"""A planned workload as a subject: its ranks execute its plan's own edges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.base.devices import take_device
from sumgrad.base.tensors import hash_weights
from sumgrad.faults.plan import find_fault, plant
from sumgrad.ledger.process_group import Ledger
from sumgrad.plan.edges import Norm, Plan, build_plan
from sumgrad.record.bits import BITS
from sumgrad.record.ranks import RankFiles
from sumgrad.record.reference import Grads, Parts, Reference
from sumgrad.record.spec import RunSpec
from sumgrad.subjects.planned.bitwise.reference import single_bits
from sumgrad.subjects.planned.bitwise.step import run_bitwise_step
from sumgrad.subjects.planned.context import Memory, RankContext
from sumgrad.subjects.planned.reference import Job, compute_partials, compute_reference
from sumgrad.subjects.planned.step import run_step
from sumgrad.subjects.planned.workload import (
    Formulas,
    Workload,
    check_params,
    load_workload,
    rank_formulas,
)
from sumgrad.subjects.subject import Progress


class PlannedStep:
    """A workload on the ranks of a spec."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.workload = load_workload(spec.workload, spec.topology, seed=spec.seed)

    def run_rank(self, rank: int, ledger: Ledger, files: RankFiles) -> Mapping[str, Any]:
        """Returns gradients; counts, norms, digests and the hash of the weights of every step."""
        spec = self.spec
        plan = build_plan(spec.topology, self.workload.declaration)
        if spec.fault:
            plan = plant(find_fault(spec.fault), plan)
        group, device = _pool_group(plan, rank), take_device(spec.device)
        steps = []
        for tier, dtype_name in spec.tiers.items():
            dtype = getattr(torch, dtype_name)
            ctx = RankContext(
                plan=plan,
                rank=rank,
                formulas=rank_formulas(self.workload, dtype, str(device), kernels=spec.kernels),
                group=group,
                ledger=ledger,
                dtype=dtype,
                device=device,
                tier=tier,
            )
            memory = Memory()
            for step in range(spec.steps):
                params = _params(self.workload, step, dtype, device)
                result = run_step(ctx, params, step=step, memory=memory)
                files.keep(f"{tier}/{step}", result.grads)
                steps.append(
                    {
                        "tier": tier,
                        "step": step,
                        "counts": result.counts,
                        "norm": result.norm,
                        "clipped_norm": result.clipped_norm,
                        "weights": hash_weights(params),
                        "digests": [asdict(digest) for digest in result.digests],
                    }
                )
        if spec.bitwise:
            self._run_bitwise(plan, rank, group, ledger, files)
        return {"steps": steps, "operations": ledger.num_operations}

    def _run_bitwise(
        self, plan: Plan, rank: int, group: dist.ProcessGroup, ledger: Ledger, files: RankFiles
    ) -> None:
        """Every step once more, one row a call and by canonical trees."""
        dtype = getattr(torch, self.spec.bitwise)
        ctx = RankContext(
            plan=plan,
            rank=rank,
            formulas=self._bitwise_formulas(),
            group=group,
            ledger=ledger,
            dtype=dtype,
            device=torch.device("cpu"),
            tier=BITS,
        )
        memory = Memory()
        for step in range(self.spec.steps):
            params = _params(self.workload, step, dtype)
            held = run_bitwise_step(ctx, params, step=step, memory=memory)
            files.keep(f"{BITS}/{step}", held)

    def _bitwise_formulas(self) -> Formulas:
        kernels = "torch" if self.spec.bitwise_kernels == "fixed" else self.spec.bitwise_kernels
        dtype = getattr(torch, self.spec.bitwise)
        return rank_formulas(self.workload, dtype, "cpu", kernels=kernels)

    def pieces(self) -> list[str]:
        return [
            f"tier {tier}" for tier in (*self.spec.tiers, *([BITS] if self.spec.bitwise else []))
        ]

    def bits(self) -> Iterator[tuple[int, Grads, Sequence[str]]]:
        """What one process has in the bitwise tier: step, tensors by name, problems."""
        plan = build_plan(self.spec.topology, self.workload.declaration)
        (edge,) = plan.select(Norm)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            found = single_bits(
                self.workload,
                self._bitwise_formulas(),
                getattr(torch, self.spec.bitwise),
                steps=self.spec.steps,
                max_norm=edge.max_norm,
            )
        finally:
            torch.set_num_threads(threads)
        for one in found:
            yield one.step, one.tensors, one.problems

    def references(self, piece: str, *, progress: Progress) -> Iterator[tuple[str, Reference]]:
        tier = piece.removeprefix("tier ")
        for reference in compute_reference(self._job(tier), progress=progress):
            yield tier, reference

    def surer_references(self, step: int, *, progress: Progress) -> dict[str, Reference]:
        return {}  # at least eight runs, always

    def parts(self, tier: str, step: int, known: Sequence[Reference]) -> dict[int, Parts]:
        plan = build_plan(self.spec.topology, self.workload.declaration)
        producer = plan.producer_pool
        cuts = plan.offsets[producer] if producer else (0, plan.declaration.num_rows)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            found = compute_partials(
                self._job(tier),
                steps=[s for s in (step - 1, step) if s >= 0],
                local_rows=list(itertools.pairwise(cuts)),
            )
        finally:
            torch.set_num_threads(threads)
        return {step: Parts(partials=partials) for step, partials in found.items()}

    def _job(self, tier: str) -> Job:
        """What the reference of a tier is computed from: units by producer, no plan edge."""
        topology = self.spec.topology
        plan = build_plan(topology, self.workload.declaration)
        return Job(
            workload=self.workload,
            producers={
                term.name: [(p.name, plan.units[p.name]) for p in topology.with_role(term.role)]
                for term in plan.declaration.terms
            },
            dtype=getattr(torch, self.spec.tiers[tier]),
            device="cpu",
            steps=self.spec.steps,
            num_chunks=max(pool.size for pool in topology.pools),
            kernels=self.spec.kernels,
            ranks_on=self.spec.device,
        )


def _params(
    workload: Workload, step: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    params = workload.params(step)
    check_params(workload, params)
    return {name: value.to(dtype=dtype, device=device) for name, value in params.items()}


def _pool_group(plan: Plan, rank: int) -> dist.ProcessGroup:
    ranks = list(plan.topology.pool_of(rank).ranks)
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), group
    return group
