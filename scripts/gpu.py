"""What only a machine with a GPU can show: one command, results as data, and a page of them.

    python scripts/gpu.py                 writes docs/data/gpu_NAME_*.json and docs/gpu.md
    python scripts/gpu.py --try-on-cpu    every step at toy sizes, interpreted: does it run?
    python scripts/gpu.py --page          writes docs/gpu.md again from the data

The invariance matrix in three dtypes; raw bits at real sizes and a benchmark (gpu_bench.py); checks
of the shipped topologies on CUDA ranks (gpu_checks.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # what is beside it

from gpu_bench import bench_all
from gpu_checks import all_checks
from gpu_page import write_page

DATA = Path(__file__).resolve().parent.parent / "docs" / "data"
DTYPES = ("float32", "bfloat16", "float16")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--try-on-cpu", action="store_true", help="toy sizes, interpreted")
    parser.add_argument("--out", type=Path, default=DATA, help="folder of the results")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.page:
        write_page(args.out)
        return 0
    device = "cpu" if args.try_on_cpu else "cuda"
    if args.try_on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    import triton

    if not args.try_on_cpu and not torch.cuda.is_available():
        print("scripts/gpu.py: no GPU here; --try-on-cpu runs every step at toy sizes")
        return 2
    if args.warm:
        bench_all(device, tiny=args.try_on_cpu, warm=True)
        return 0
    name = "cpu" if args.try_on_cpu else torch.cuda.get_device_name().lower().replace(" ", "_")
    args.out.mkdir(parents=True, exist_ok=True)
    codes = _ops(args, name, device)
    data = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
    bench = bench_all(device, tiny=args.try_on_cpu)
    (args.out / f"gpu_{name}_bench.json").write_text(json.dumps(data | bench, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        checks = all_checks(device, Path(folder), few=args.try_on_cpu)
    kept = json.dumps(data | {"checks": checks}, indent=1) + "\n"
    (args.out / f"gpu_{name}_checks.json").write_text(kept)
    if not args.try_on_cpu:
        write_page(args.out)
    right = all(case["verdict"] == case["right"] for case in checks)
    return 0 if right and not any(codes) and all(bench["same_bits_at_real_sizes"].values()) else 1


def _ops(args: argparse.Namespace, name: str, device: str) -> list[int]:
    """The matrix in every dtype, beside a run that lets the benchmark's kernels compile."""
    flags = ["--op", "swiglu"] if args.try_on_cpu else []
    commands = [
        [sys.executable, "-m", "sumgrad", "ops", "--device", device, "--dtype", dtype, *flags,
         "--json", str(args.out / f"gpu_{name}_ops_{dtype}.json")]
        for dtype in (DTYPES[:1] if args.try_on_cpu else DTYPES)
    ]  # fmt: skip
    if not args.try_on_cpu:
        commands.append([sys.executable, __file__, "--warm"])
    started = [subprocess.Popen(command) for command in commands]
    return [process.wait() for process in started]


if __name__ == "__main__":
    sys.exit(main())
