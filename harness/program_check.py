"""What a check of a Program does otherwise than that of a workload: probe, rank, reference, judge.

A Program is looked at once in a process of its own before any rank starts: what raises, hangs or
is drawn unseeded there is named there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sumgrad.files import write_json
from sumgrad.launch import Launcher, RankJob
from sumgrad.manifest import NO_CHANGES, Changes
from sumgrad.program import Facts, check_options_taken
from sumgrad.program_faults import find_program_fault
from sumgrad.program_judge import judge_program
from sumgrad.program_probe import broken_facts
from sumgrad.program_record import ProgramSpec, load_program_record
from sumgrad.topology import Topology, topology_to_json
from sumgrad.verdict import Verdict

PROBE_DIRECTORY = "probe"
DEFAULT_STEPS = 2  # a gradient may be zero at the first weights, and a stale buffer needs a second


def make_program_spec(
    topology: Topology,
    name: str,
    *,
    seed: int,
    steps: int | None,
    tiers: Mapping[str, str],
    fault: str | None,
    law: str,
    timeout_s: float,
    reproduce: Callable[[int], str],
    versions: dict[str, str],
    look: Callable[[Topology, str, int], Facts],
) -> ProgramSpec:
    """Validate and probe. look: probes, in this process or another one. Raises UserError."""
    if fault:
        find_program_fault(fault, name)
    num_steps = steps or DEFAULT_STEPS
    check_options_taken(name, topology)
    facts = look(topology, name, seed)
    skipped = {}
    if facts.float64 is not None:
        skipped = {tier: f"it cannot run in float64: {facts.float64}"
                   for tier, dtype in tiers.items() if dtype == "float64"}  # fmt: skip
    return ProgramSpec(
        topology=topology,
        facts=facts,
        workload=name,
        seed=seed,
        steps=num_steps,
        tiers={t: d for t, d in tiers.items() if t not in skipped and not facts.problems},
        skipped=skipped,
        fault=fault,
        law=law,
        timeout_s=timeout_s,
        reproduce=reproduce(num_steps),
        versions=versions,
    )


def look_beside(launcher: Launcher, directory: Path, timeout_s: float) -> Any:
    """Probe in a process of its own, under a deadline, recorded below the run directory."""

    def look(topology: Topology, name: str, seed: int) -> Facts:
        place = directory / PROBE_DIRECTORY
        (place / "ranks").mkdir(parents=True)
        write_json(place / "topology.json", topology_to_json(topology))
        job = RankJob(
            target="sumgrad.program_job:probe_rank",
            num_ranks=1,
            directory=place,
            arguments={"workload": name, "seed": seed},
            timeout_s=timeout_s,
        )
        (outcome,) = launcher.run(job)
        if outcome.ok:
            return facts_from_json(json.loads((place / "facts.json").read_text()))
        lines = [line.strip() for line in (outcome.stack or "").splitlines() if "File" in line]
        ours = os.path.dirname(os.path.abspath(__file__))
        users = [line for line in lines if "/torch/" not in line and ours not in line]
        where = f"; it stood at {users[-1]}" if users else ""
        return broken_facts(
            f"build(), batch() or loss_sum() in a single process: {outcome.status}, "
            f"{outcome.detail}{where}"
        )

    return look


def facts_from_json(data: dict[str, Any]) -> Facts:
    """Read back what was probed."""
    params = {name: tuple(shape) for name, shape in data["params"].items()}
    more = {key: tuple(data[key]) for key in ("terms", "problems")}
    return Facts(**{**data, "params": params, **more})


def judge_program_directory(
    directory: Path, *, law: str | None = None, changes: Changes = NO_CHANGES
) -> Verdict:
    """Judge a stored run. changes: as `load_program_record` takes them."""
    record = load_program_record(directory, changes=changes)
    if law:
        record = replace(record, spec=replace(record.spec, law=law))
    return judge_program(record)
