"""What the processes of a Program's check run: the probe, a rank, a tier's reference."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from sumgrad.errors import UserError
from sumgrad.files import write_json
from sumgrad.process_group import Ledger
from sumgrad.program import Broken, Facts, make_program
from sumgrad.program_probe import broken_facts, probe
from sumgrad.program_rank import ProgramJob, run_program
from sumgrad.program_record import ProgramSpec, write_program_rank, write_program_reference
from sumgrad.program_reference import compute_program_reference
from sumgrad.rank import RankGuard
from sumgrad.topology import Topology, topology_from_json


def look_here(topology: Topology, name: str, seed: int) -> Facts:
    """Probe in this process."""
    try:
        return probe(make_program(name, topology, seed=seed))
    except UserError as error:
        return broken_facts(str(error))


def probe_rank(guard: RankGuard, *, workload: str, seed: int) -> None:
    """The process that looks at a Program."""
    directory = guard.env.directory
    path = directory / "topology.json"
    topology = topology_from_json(json.loads(path.read_text()), path=path)
    write_json(directory / "facts.json", asdict(look_here(topology, workload, seed)))


def run_program_rank(guard: RankGuard, spec: ProgramSpec, ledger: Ledger) -> dict[str, Any]:
    """One rank of a check: write its gradients, return what goes into its end record."""
    tensors, result = run_program(guard, job_of(spec), ledger)
    write_program_rank(guard.env.directory, guard.env.rank, tensors)
    return result


def job_of(spec: ProgramSpec) -> ProgramJob:
    """What the ranks of a spec run."""
    return ProgramJob(
        topology=spec.topology,
        workload=spec.workload,
        facts=spec.facts,
        seed=spec.seed,
        steps=spec.steps,
        tiers=spec.tiers,
        fault=spec.fault,
    )


def store_program_reference(directory: Path, spec: ProgramSpec, tier: str) -> None:
    """Compute and write a tier's reference. Raises Broken where loss_sum does."""
    program = make_program(spec.workload, spec.topology, seed=spec.seed)
    try:
        references = compute_program_reference(
            program,
            spec.facts,
            getattr(torch, spec.tiers[tier]),
            steps=spec.steps,
            num_chunks=max(pool.size for pool in spec.topology.pools),
        )
    except (UserError, Broken):
        raise
    except Exception as error:
        raise Broken(f"loss_sum() raised {type(error).__name__}: {error}") from error
    write_program_reference(directory, tier, references)
