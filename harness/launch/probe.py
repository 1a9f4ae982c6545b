"""Looking at a Program before any rank starts, in a process of its own: what raises, hangs or is
drawn unseeded there is named there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from sumgrad.base.files import PACKAGE, write_json
from sumgrad.launch.ask import Look
from sumgrad.launch.guard import RankGuard
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.record.spec import Facts, facts_from_json
from sumgrad.subjects.program.job import look_here
from sumgrad.subjects.program.probe import broken_facts
from sumgrad.topology.pools import Topology, topology_from_json, topology_to_json

PROBE_DIRECTORY = "probe"


def probe_rank(guard: RankGuard, *, workload: str, seed: int, lift: bool) -> None:
    """The process that looks at a Program."""
    directory = guard.env.directory
    path = directory / "topology.json"
    topology = topology_from_json(json.loads(path.read_text()), path=path)
    write_json(directory / "facts.json", asdict(look_here(topology, workload, seed, lift)))


def look_beside(launcher: Launcher, directory: Path, timeout_s: float) -> Look:
    """Probe in a process of its own, under a deadline, recorded below the run directory."""

    def look(topology: Topology, name: str, seed: int, lift: bool) -> Facts:
        place = directory / PROBE_DIRECTORY
        (place / "ranks").mkdir(parents=True)
        write_json(place / "topology.json", topology_to_json(topology))
        job = RankJob(
            target="sumgrad.launch.probe:probe_rank",
            num_ranks=1,
            directory=place,
            arguments={"workload": name, "seed": seed, "lift": lift},
            timeout_s=timeout_s,
        )
        (outcome,) = launcher.run(job)
        if outcome.ok:
            return facts_from_json(json.loads((place / "facts.json").read_text()))
        lines = [line.strip() for line in (outcome.stack or "").splitlines() if "File" in line]
        ours = str(PACKAGE)
        users = [line for line in lines if "/torch/" not in line and ours not in line]
        where = f"; it stood at {users[-1]}" if users else ""
        return broken_facts(
            f"build(), batch() or loss_sum() in a single process: {outcome.status}, "
            f"{outcome.detail}{where}"
        )

    return look
