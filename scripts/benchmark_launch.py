"""Start-up, whole checks and memory: the local launcher against torchrun, side by side in one run.

    python scripts/benchmark_launch.py --out docs/data/benchmark_launch.json

Times are wall seconds, medians where repeated; memory is the summed Pss of every process of the run
(the command, the fork server, ranks and helpers), sampled while it runs. Needs Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.launch.versions import versions
from sumgrad.topology.pools import load_topology
from sumgrad.topology.shipped import topologies_directory

ROOT = Path(__file__).resolve().parent.parent
TRIVIAL = """
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
assert x.item() == dist.get_world_size()
dist.destroy_process_group()
"""
GROWING = ["three_pool_ones", "three_pool", "three_pool_primes", "three_pool_wide"]


def trivial(guard) -> None:
    """What the local launcher starts: the same as TRIVIAL."""
    import torch
    import torch.distributed as dist

    env = guard.env
    store = dist.FileStore(str(env.rendezvous), env.world_size)
    dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == env.world_size
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = {
        "command": "python scripts/benchmark_launch.py",
        "machine": {"cores": os.cpu_count(), "processor": processor(), **versions()},
        "start_up_10_ranks_s": start_up(args.repeat),
        "whole_check_three_pool_s": whole_check(args.repeat),
        "growing": [grow(name) for name in GROWING],
    }
    start, check = result["start_up_10_ranks_s"], result["whole_check_three_pool_s"]
    result["ratios"] = {
        "start_up_torchrun_over_local_warm": start["torchrun_again"] / start["local_warm_median"],
        "check_torchrun_over_local_warm": check["torchrun_again"] / check["local_warm_median"],
        "check_torchrun_over_local_cold": check["torchrun_first"] / check["local_cold"],
    }
    text = json.dumps(rounded(result), indent=1)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    return 0


def start_up(repeat: int) -> dict:
    """Ten trivial ranks from nothing, from a warm server, and under torchrun."""
    began = time.monotonic()
    warm = []
    with Launcher() as launcher:
        for i in range(repeat + 1):
            started = time.monotonic() if i else began
            with tempfile.TemporaryDirectory() as directory:
                job = RankJob(target=f"{__file__}:trivial", num_ranks=10, directory=Path(directory))
                assert all(o.ok for o in launcher.run(job))
            warm.append(time.monotonic() - started)
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "trivial.py"
        script.write_text(TRIVIAL)
        seconds = [timed(torchrun(10, str(script))) for _ in range(2)]
    return {
        "local_cold": warm[0],
        **spread("local_warm", warm[1:]),
        "torchrun_first": seconds[0],
        "torchrun_again": seconds[1],
    }


def whole_check(repeat: int) -> dict:
    """The main job: reference, two tiers, ten ranks, verdict."""
    path = topologies_directory() / "three_pool.yaml"
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "sumgrad", "run", str(path), "--quiet"]
        cold = timed([*command, "--out", f"{directory}/cold"])
        script = str(ROOT / "harness" / "run.py")
        flags = ["--topology", str(path), "--quiet", "--out", f"{directory}/torchrun"]
        flags = flags[:-1]
        under_torchrun = [
            timed(torchrun(10, script, *flags, f"{directory}/torchrun{i}")) for i in range(2)
        ]
        warm = []
        with Launcher() as launcher:
            launcher.wait_ready()
            for i in range(repeat + 1):
                started = time.monotonic()
                options = CheckOptions(topology=path, out=Path(directory, str(i)))
                verdict, _ = run_check(options, launcher=launcher)
                assert verdict.status == "pass"
                warm.append(time.monotonic() - started)
    return {
        "local_cold": cold,
        **spread("local_warm", warm[1:]),
        "torchrun_first": under_torchrun[0],
        "torchrun_again": under_torchrun[1],
    }


def grow(name: str) -> dict:
    """One warm check with memory sampled."""
    path = topologies_directory() / f"{name}.yaml"
    with Launcher() as launcher, tempfile.TemporaryDirectory() as directory:
        launcher.wait_ready()
        with Sampler() as sampler:
            started = time.monotonic()
            options = CheckOptions(topology=path, out=Path(directory))
            verdict, _ = run_check(options, launcher=launcher)
            seconds = time.monotonic() - started
    return {
        "topology": name,
        "ranks": load_topology(path).world_size,
        "status": verdict.status,
        "wall_s": seconds,
        "peak_pss_mib": sampler.peak_kib / 1024,
        "pss_mib_per_rank": sampler.peak_kib / 1024 / load_topology(path).world_size,
    }


class Sampler:
    """Peak of the summed Pss of a process (default: this one) and all its descendants."""

    def __init__(self, root: int | None = None, *, every_s: float = 0.05) -> None:
        self.root, self.every_s = os.getpid() if root is None else root, every_s
        self.peak_kib = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.every_s):
            self.peak_kib = max(self.peak_kib, sum(map(pss_kib, descendants(self.root))))


def descendants(root: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    family, grew = {root}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grew = bool(more)
    return list(family)


def pss_kib(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def torchrun(num_ranks: int, *argv: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(num_ranks), *argv]  # fmt: skip


def timed(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return time.monotonic() - started


def spread(name: str, values: list[float]) -> dict:
    return {f"{name}_median": statistics.median(values), f"{name}_max": max(values)}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def rounded(value):
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
