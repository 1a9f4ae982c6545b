"""A check's references, computed and stored by a helper process or by the judging rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from sumgrad.plan import build_plan
from sumgrad.program_job import store_program_reference
from sumgrad.program_record import is_program_run, read_program_spec
from sumgrad.rank import RankGuard
from sumgrad.record import RunSpec, read_spec, write_partials, write_reference
from sumgrad.reference import Job, compute_partials, compute_reference
from sumgrad.workload import Workload, load_workload


def reference_helper(guard: RankGuard, *, tier: str) -> None:
    """One tier's reference, in a process beside the ranks."""
    directory = guard.env.directory.parent
    if is_program_run(directory):
        store_program_reference(directory, read_program_spec(directory), tier)
        return
    spec = read_spec(directory)
    workload = load_workload(spec.workload, spec.topology, seed=spec.seed)
    store_reference(directory, spec, workload, tier)


def store_reference(
    directory: Path,
    spec: RunSpec,
    workload: Workload,
    tier: str,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Compute and write the reference of every step of a tier."""
    references = compute_reference(reference_job(spec, workload, tier), progress=progress)
    write_reference(directory, tier, references)


def store_partials(
    directory: Path, spec: RunSpec, workload: Workload, tier: str, step: int
) -> None:
    """Compute and write the float64 partials of a step and of the one before it."""
    plan = build_plan(spec.topology, spec.declaration)
    producer = plan.producer_pool
    cuts = plan.offsets[producer] if producer else (0, spec.declaration.num_rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        partials = compute_partials(
            reference_job(spec, workload, tier),
            steps=[s for s in (step - 1, step) if s >= 0],
            local_rows=list(itertools.pairwise(cuts)),
        )
    finally:
        torch.set_num_threads(threads)
    write_partials(directory, tier, partials)


def reference_job(spec: RunSpec, workload: Workload, tier: str) -> Job:
    """What the reference of a tier is computed from: units by producer, no plan edge."""
    topology = spec.topology
    plan = build_plan(topology, spec.declaration)
    return Job(
        workload=workload,
        producers={
            term.name: [(p.name, plan.units[p.name]) for p in topology.with_role(term.role)]
            for term in spec.declaration.terms
        },
        dtype=getattr(torch, spec.tiers[tier]),
        device="cpu",
        steps=spec.steps,
        num_chunks=max(pool.size for pool in topology.pools),
        kernels=spec.kernels,
    )
