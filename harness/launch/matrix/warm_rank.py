"""One rank that runs a Program with one fault after the other, without being started again.

Each fault has a directory of its own with the files of an ordinary run. A fault that raises or
hangs ends the ranks; what was written before stands, and the matrix goes on behind it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from sumgrad.base.files import write_json
from sumgrad.base.outcome import SETUP
from sumgrad.faults.step import find_program_fault
from sumgrad.launch.again.trace import write_with_operations
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.rank import local_group
from sumgrad.ledger.process_group import Ledger
from sumgrad.record.endings import rank_file
from sumgrad.record.ranks import RankFiles
from sumgrad.record.spec import RunSpec, read_spec
from sumgrad.subjects.program.rank import Rank


def run_faults(guard: RankGuard, *, faults: list[str], look: bool = False) -> None:
    """Run each of these, as `--fault` takes them, on the Program of the directory's run.json.

    look: every step of each once more, with eyes on its modules.
    """
    directory, number = guard.env.directory, guard.env.rank
    with local_group(guard) as ledger:
        spec = read_spec(directory)
        rank = Rank(spec.topology, number, ledger, spec.device)
        for i, fault in enumerate(faults):
            guard.renew()
            place = fault_directory(directory, i)
            (place / "ranks").mkdir(parents=True, exist_ok=True)
            _write_ledger_to(ledger, guard, rank_file(place, number, ".ledger.jsonl"))
            steps = find_program_fault(fault, spec.workload).min_steps
            files = RankFiles(place, number)
            job = replace(spec, fault=fault, steps=steps)
            result = {**rank.run(job, files, again=False), "grads": files.finish()}
            if look:
                _look(rank, job, place)
            end = {"rank": number, "status": "ok", "result": result}
            write_json(rank_file(place, number, ".json"), end)
            with ledger.label(SETUP):
                dist.barrier()


def _look(rank: Rank, job: RunSpec, place: Path) -> None:
    """What goes through the modules of each step; its ledger apart from the judged one."""
    tier = next(iter(job.tiers))
    for step in range(job.steps):
        folder = trace_directory(place, step)
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
        rank.ledger.redirect(rank_file(folder, rank.rank, ".ledger.jsonl"))
        write_with_operations(folder, rank.rank, rank.trace(job, tier, step))


def trace_directory(place: Path, step: int) -> Path:
    """Where the ranks of a fault write what went through their modules in a step."""
    return place / f"trace{step}"


def fault_directory(directory: Path, number: int) -> Path:
    """Where the ranks of a matrix write one fault."""
    return directory / "faults" / f"{number:04d}"


def _write_ledger_to(ledger: Ledger, guard: RankGuard, path: Path) -> None:
    """Go on in a fault's own ledger; the launcher finds it by the rank's usual name."""
    ledger.redirect(path)
    usual = guard.env.file(".ledger.jsonl")
    link = usual.with_suffix(".link")
    os.symlink(path.resolve(), link)
    os.replace(link, usual)
