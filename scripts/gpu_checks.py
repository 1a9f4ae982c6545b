"""Checks of the shipped topologies on ranks with CUDA tensors, for scripts/gpu.py.

    python scripts/gpu_checks.py PART PARTS FILE DEVICE    every PARTS-th case, into FILE

Several ranks share a GPU over Gloo; one rank with one GPU is over NCCL.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PROCESSES = 4  # that run checks side by side


def cases(directory: Path) -> list[tuple[str, dict[str, Any], str]]:
    """Name, flags and the verdict that is right."""
    from sumgrad.topology.shipped import find_topology

    shared = ["data_parallel", "ddp", "fsdp2", "hsdp", "megatron", "pipeline", "tensor_parallel",
              "sequence_parallel", "context_parallel", "expert_parallel", "two_pools"]  # fmt: skip
    given: list[tuple[str, str, dict[str, Any], str]] = [
        ("three_pool, Triton's kernels", "three_pool", {}, "pass"),
        ("three_pool, torch's", "three_pool", {"kernels": "torch"}, "pass"),
        *((name, name, {}, "pass") for name in shared),
        ("three_pool, a planted average", "three_pool", {"fault": "avg_on_ci"}, "fail"),
        ("ddp, a lost micro-batch", "ddp", {"fault": "keep_last_microbatch"}, "fail"),
        ("fsdp2, divided once more", "fsdp2", {"fault": "divide_by_world"}, "fail"),
    ]
    out = [(name, {"topology": find_topology(Path(t)), **more}, status)
           for name, t, more, status in given]  # fmt: skip
    for workload, fault in (("ddp", None), ("fsdp2", None), ("ddp", "keep_last_microbatch")):
        path = directory / f"{workload}_alone.yaml"
        path.write_text(f"workload: {workload}\npools:\n  train: {{axes: {{dp: 1}}}}\n")
        name = f"{workload}, one rank and one GPU" + (", a lost micro-batch" if fault else "")
        out.append((name, {"topology": path, "fault": fault}, "fail" if fault else "pass"))
    return out


def run_checks(part: int, parts: int, target: Path, device: str) -> None:
    """Every parts-th of the cases, one after another; each is written when it is known."""
    from sumgrad.launch.ask import CheckOptions
    from sumgrad.launch.check import run_check
    from sumgrad.launch.local.launcher import Launcher

    done = []
    with tempfile.TemporaryDirectory() as folder, Launcher() as launcher:
        for i, (name, flags, right) in enumerate(cases(Path(folder))[part::parts]):
            started = time.monotonic()
            options = CheckOptions(**flags, device=device, out=Path(folder) / f"run{i}")
            try:
                verdict, _ = run_check(options, launcher=launcher)
                worst = {t.name: t.worst_of_threshold for t in verdict.tiers}
                got, why = verdict.status, [d.cause for d in verdict.diagnoses]
                why += [*verdict.findings, *verdict.reasons][:3]
            except Exception as error:
                got, why, worst = type(error).__name__, [str(error)[:300]], {}
            done.append({"case": name, "verdict": got, "right": right, "worst": worst, "says": why,
                         "seconds": round(time.monotonic() - started, 1)})  # fmt: skip
            print(f"{name:45} {got:8} {done[-1]['seconds']} s", flush=True)
            target.write_text(json.dumps(done))


def all_checks(device: str, folder: Path, *, few: bool) -> list[dict[str, Any]]:
    """All cases, in several processes; few: two of them."""
    processes, parts = (1, 10) if few else (PROCESSES, PROCESSES)
    targets = [folder / f"checks{i}.json" for i in range(processes)]
    started = [
        subprocess.Popen([sys.executable, __file__, str(i), str(parts), str(target), device])
        for i, target in enumerate(targets)
    ]
    codes = [process.wait() for process in started]
    done = [case for t in targets if t.exists() for case in json.loads(t.read_text())]
    asked = cases(folder)
    lost = {name for i in range(processes) for name, *_ in asked[i::parts]}
    for name in sorted(lost - {case["case"] for case in done}):
        why = [f"its process ended with {codes}"]
        done.append({"case": name, "verdict": "none", "right": "?", "worst": {}, "says": why,
                     "seconds": 0.0})  # fmt: skip
    return done


if __name__ == "__main__":
    run_checks(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
