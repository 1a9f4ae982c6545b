"""Clean runs over many seeds and every shipped topology: alarms, and how loose thresholds are.

    python scripts/false_alarms.py --seeds 20 --out docs/data/false_alarms.json

Writes one line for each (topology, dtype): runs, alarms, worst and median error as a part of the
threshold, worst relative errors, and for the published size the figures beside the published 4e-7.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.matrix.run import default_topologies
from sumgrad.launch.versions import versions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topologies", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--kernels", choices=("torch", "triton"), default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows = []
    with Launcher() as launcher:
        for path in args.topologies or default_topologies():
            for dtype in args.dtypes.split(","):
                started = time.monotonic()
                row = sweep(path, dtype, args.seeds, args.steps, launcher, args.kernels)
                rows.append({**row, "seconds": round(time.monotonic() - started, 1)})
                print(json.dumps(rows[-1]), flush=True)
    alarms = sum(row["alarms"] for row in rows)
    machine = {"processor": platform.processor() or platform.machine(), **versions()}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"command": " ".join(sys.argv), "machine": machine, "rows": rows}, indent=1)
            + "\n"
        )
    print(f"{alarms} alarms in {sum(row['runs'] for row in rows)} runs")
    return 1 if alarms else 0


def sweep(
    path: Path, dtype: str, seeds: int, steps: int, launcher: Launcher, kernels: str | None
) -> dict:
    """All seeds of one topology and working dtype."""
    tensors, statuses, worst = [], [], {"structure": [], "precision": []}
    same_max, same_l2 = [], []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as directory:
            options = CheckOptions(
                topology=path,
                dtype=dtype,
                seed=seed,
                steps=steps,
                out=Path(directory),
                kernels=kernels,
            )
            verdict, _ = run_check(options, launcher=launcher)
        statuses.append(verdict.status)
        if verdict.status != "pass":
            print(
                path.stem,
                dtype,
                seed,
                verdict.status,
                verdict.reasons,
                verdict.findings[:2],
                [t for t in verdict.data["tensors"] if t["status"] != "pass"][:2],
                flush=True,
            )
        tensors += verdict.data["tensors"]
        for tier in verdict.tiers:
            worst[tier.name].append(tier.worst_rel)
            if tier.name == "precision":
                same_max.append(tier.worst_rel_same_dtype)
                same_l2.append(tier.worst_l2_rel_same_dtype)
    return {
        "topology": path.stem,
        "dtype": dtype,
        "runs": seeds,
        "alarms": statuses.count("fail"),
        "unknown": statuses.count("unknown"),
        "structure": summary(tensors, "structure", worst),
        "precision": {
            **summary(tensors, "precision", worst),
            "same_dtype_max_norm": spread(same_max),
            "same_dtype_l2": spread(same_l2),
        },
    }


def summary(tensors: list[dict], tier: str, worst: dict[str, list[float]]) -> dict:
    """Errors as parts of the threshold, and the worst relative error over seeds."""
    mine = [t for t in tensors if t["tier"] == tier]
    of_threshold = [t["max_abs"] / t["threshold"] if t["max_abs"] else 0.0 for t in mine]
    ratios = [abs(t["ratio"] - 1) for t in mine if t["ratio"] is not None]
    return {
        "tensors": len(mine),
        "median_of_threshold": round(statistics.median(of_threshold), 4),
        "max_of_threshold": round(max(of_threshold), 4),
        "worst_rel": spread(worst[tier]),
        "worst_ratio_minus_1": max(ratios),
        "smallest_scale_error_caught": max(
            t["smallest_scale_error_caught"]
            for t in mine
            if isinstance(t["smallest_scale_error_caught"], float)
        ),
    }


def spread(values: list[float]) -> dict:
    """Median and maximum over seeds."""
    return {"median": statistics.median(values), "max": max(values)}


if __name__ == "__main__":
    sys.exit(main())
