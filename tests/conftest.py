"""Shared fixtures. Ranks are started by the pytest plugin that users get."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: the ranks need the cores
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton: kernels are tested on CPU tensors

import pytest
from sumgrad.plan.edges import Plan, build_plan
from sumgrad.subjects.planned.workload import load_workload
from sumgrad.topology.pools import load_topology
from sumgrad.topology.shipped import shipped_topologies

for name in ("COLUMNS", "LINES"):  # pytest's readline puts them past os.environ, into every child
    os.unsetenv(name)

pytest_plugins = ["pytester"]
TOPOLOGIES = [load_topology(path) for path in shipped_topologies()]
RUNNABLE = [t.name for t in TOPOLOGIES if t.workload == "three_pool" and not t.plan_only]
PROGRAMS = [t.name for t in TOPOLOGIES if t.workload != "three_pool"]
ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))  # whose functions are tested like any others


MY_STEP = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class MyStep:
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def batch(self):
        g = torch.Generator().manual_seed(1)
        x, y = torch.randn(11, 5, generator=g), torch.randn(11, 3, generator=g)
        return {"x": x, "y": y, "mask": (torch.rand(11, 3, generator=g) > 0.3).float()}

    def loss_sum(self, model, rows):
        error = (model(rows["x"]) - rows["y"]).square() * rows["mask"]
        return error.sum(), rows["mask"].sum()

    def distribute(self, model, ctx):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, self.sum_hook)
        return ddp

    @staticmethod
    def sum_hook(_, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        count = mine["mask"].sum()
        dist.all_reduce(count)
        loss, _ = self.loss_sum(model, mine)
        (loss / count).backward()
"""


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
    from sumgrad.launch.ask import CheckOptions
    from sumgrad.launch.check import run_check

    known: dict[tuple, tuple] = {}

    def run(name: str, **flags):  # type: ignore[no-untyped-def]
        key = (name, *sorted(flags.items()))
        if key not in known:
            out = tmp_path_factory.mktemp(name)
            options = CheckOptions(topology=shipped(name), out=out, timeout_s=240, **flags)
            known[key] = run_check(options, launcher=sumgrad_launcher)
        return known[key]

    return run


@pytest.fixture
def check(tmp_path, sumgrad_launcher) -> Callable:  # type: ignore[no-untyped-def]
    """`check(body, **flags)` -> (verdict, directory): MyStep changed by `body`, on `axes`."""

    def run(body="    pass", *, timeout_s=60.0, axes="dp: 3", **flags):  # type: ignore[no-untyped-def]
        from sumgrad.launch.ask import CheckOptions
        from sumgrad.launch.check import run_check

        path, topology = tmp_path / "mine.py", tmp_path / "dp.yaml"
        path.write_text(f"{MY_STEP}\n\nclass Mine(MyStep):\n{body}\n")
        topology.write_text(
            f"name: dp\nworkload: {path}:Mine\npools:\n  train: {{axes: {{{axes}}}}}\n"
        )
        out = tmp_path / "runs" / str(time.monotonic_ns())
        options = CheckOptions(topology=topology, out=out, timeout_s=timeout_s, **flags)
        return run_check(options, launcher=sumgrad_launcher)

    return run


def text(verdict) -> str:
    """Everything that a verdict says."""
    return json.dumps(verdict.data)
