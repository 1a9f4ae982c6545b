"""Shared fixtures. Ranks are started by the pytest plugin that users get."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks need the cores

import pytest
from sumgrad.catalogue import shipped_topologies
from sumgrad.plan import Plan, build_plan
from sumgrad.topology import load_topology
from sumgrad.workload import load_workload

pytest_plugins = ["pytester"]
TOPOLOGIES = [load_topology(path) for path in shipped_topologies()]
RUNNABLE = [t.name for t in TOPOLOGIES if t.workload == "three_pool" and not t.plan_only]
PROGRAMS = [t.name for t in TOPOLOGIES if t.workload != "three_pool"]
ROOT = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """The path of a shipped topology."""
    return next(path for path in shipped_topologies() if path.stem == name)


def plan_of(name: str) -> Plan:
    """The lawful plan of a shipped topology."""
    topology = load_topology(shipped(name))
    workload = load_workload(topology.workload, topology, seed=0)
    return build_plan(topology, workload.declaration)


@pytest.fixture(scope="session")
def run_once(sumgrad_launcher, tmp_path_factory) -> Callable:  # type: ignore[no-untyped-def]
    """`run_once(topology, **flags)` -> (verdict, directory); equal calls share one run."""
    from sumgrad.check import CheckOptions, run_check

    known: dict[tuple, tuple] = {}

    def run(name: str, **flags):  # type: ignore[no-untyped-def]
        key = (name, *sorted(flags.items()))
        if key not in known:
            out = tmp_path_factory.mktemp(name)
            options = CheckOptions(topology=shipped(name), out=out, timeout_s=60, **flags)
            known[key] = run_check(options, launcher=sumgrad_launcher)
        return known[key]

    return run
