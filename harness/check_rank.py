"""What one rank does in a check, under either launcher: every tier, every step, its record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sumgrad.faults import find_fault, plant
from sumgrad.plan import Plan, build_plan
from sumgrad.process_group import BACKEND, Ledger, register_backend
from sumgrad.program_job import run_program_rank
from sumgrad.program_record import ProgramSpec, is_program_run, read_program_spec
from sumgrad.rank import SETUP, RankGuard
from sumgrad.record import RunSpec, read_spec, write_rank
from sumgrad.step import Memory, RankContext, run_step
from sumgrad.workload import (
    Workload,
    check_params,
    hash_weights,
    load_workload,
    rank_formulas,
)

Spec = RunSpec | ProgramSpec
GROUP_PATIENCE_S = 60  # the watchdog speaks first; the group's own timeout is a last resort


def check_rank(guard: RankGuard) -> dict[str, Any]:
    """A locally started rank: rendezvous by file, then the run that run.json describes."""
    with local_group(guard) as ledger:
        return run_rank(guard, read_any_spec(guard.env.directory), ledger)


@contextmanager
def local_group(guard: RankGuard) -> Iterator[Ledger]:
    """The recorded default group of a locally started rank, all ranks connected."""
    env, ledger = guard.env, start_ledger(guard)
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(str(env.rendezvous), env.world_size),  # type: ignore[attr-defined]
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=env.timeout_s + GROUP_PATIENCE_S),
    )
    try:
        meet(ledger)
        yield ledger
    finally:
        dist.destroy_process_group()


def meet(ledger: Ledger) -> None:
    """Wait until all are connected: a rank that fails at once must not look like a lost one."""
    with ledger.label(SETUP):
        dist.barrier()


def start_ledger(guard: RankGuard) -> Ledger:
    """Open this rank's ledger and make the recording backend known."""
    guard.ledger = Ledger(guard.env.file(".ledger.jsonl"))
    register_backend(guard.ledger)
    return guard.ledger


def read_any_spec(directory: Path) -> Spec:
    """The spec of a run directory, of a workload or a Program. Raises UserError."""
    return read_program_spec(directory) if is_program_run(directory) else read_spec(directory)


def run_rank(guard: RankGuard, spec: Spec, ledger: Ledger) -> dict[str, Any]:
    """Run all tiers and steps on an initialised default group; write this rank's gradients.

    Returns what goes into the rank's end record: counts, norms, digests, hash of the weights.
    """
    if isinstance(spec, ProgramSpec):
        return run_program_rank(guard, spec, ledger)
    rank = guard.env.rank
    workload = load_workload(spec.workload, spec.topology, seed=spec.seed)
    plan = build_plan(spec.topology, workload.declaration)
    if spec.fault:
        plan = plant(find_fault(spec.fault), plan)
    group = _pool_group(plan, rank)
    grads, steps = {}, []
    for tier, dtype_name in spec.tiers.items():
        dtype = getattr(torch, dtype_name)
        ctx = RankContext(
            plan=plan,
            rank=rank,
            formulas=rank_formulas(workload, dtype, "cpu", kernels=spec.kernels),
            group=group,
            ledger=ledger,
            dtype=dtype,
            device=torch.device("cpu"),
            tier=tier,
        )
        memory = Memory()
        for step in range(spec.steps):
            params = _params(workload, step, dtype)
            result = run_step(ctx, params, step=step, memory=memory)
            grads[tier, step] = result.grads
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
    write_rank(guard.env.directory, rank, grads)
    return {"steps": steps, "operations": ledger.num_operations}


def _params(workload: Workload, step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    params = workload.params(step)
    check_params(workload, params)
    return {name: value.to(dtype) for name, value in params.items()}


def _pool_group(plan: Plan, rank: int) -> dist.ProcessGroup:
    ranks = list(plan.topology.pool_of(rank).ranks)
    group = dist.new_group(ranks, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), group
    return group
