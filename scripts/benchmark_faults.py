"""What one more fault costs on warm ranks, beside one cold check under torchrun, side by side.

    python scripts/benchmark_faults.py --out docs/data/benchmark_faults.json

Ten ranks of plain data parallelism. A fault's cost is the difference between a matrix with all
faults and one with a single fault, divided by how many more there were: ranks, records, verdicts.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.matrix.run import run_matrix
from sumgrad.launch.versions import versions
from sumgrad.topology.shipped import topologies_directory

RANKS = 10
RUN = Path(__file__).resolve().parent.parent / "harness" / "run.py"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        topology = Path(name, "ten.yaml")
        shipped = topologies_directory() / "data_parallel.yaml"
        topology.write_text(shipped.read_text().replace("dp: 3", f"dp: {RANKS}"))
        with Launcher() as launcher:
            launcher.wait_ready()
            one, few = matrix(topology, launcher, ["avg:allreduce@dp#1"])
            full, many = matrix(topology, launcher, None)
        cold = torchrun(topology)
    per_fault = (full - one) / (many - few)
    result = {
        "command": " ".join(sys.argv),
        "machine": {"processor": platform.processor() or platform.machine(), **versions()},
        "ranks": RANKS,
        "cold_torchrun_check_s": round(cold, 2),
        "faults": many,
        "seconds_per_fault": round(per_fault, 3),
        "cold_check_over_fault": round(cold / per_fault, 1),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def matrix(topology: Path, launcher: Launcher, faults: list[str] | None) -> tuple[float, int]:
    """Seconds, and how many faults ran."""
    started = time.monotonic()
    found = run_matrix(
        [topology], faults=faults, seed=0, timeout_s=120, launcher=launcher,
        progress=lambda _: None,
    )  # fmt: skip
    return time.monotonic() - started, len(found.cells) - 1


def torchrun(topology: Path) -> float:
    """Seconds of one check, everything cold."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               str(RANKS), str(RUN), "--topology", str(topology), "--quiet",
               "--out", str(topology.parent / "run")]  # fmt: skip
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
