"""Verdicts of stored runs: a change of the code that judges must not change what it says.

    scripts/stored_verdicts.py make DIR                 # run them and keep runs and verdicts
    scripts/stored_verdicts.py judge DIR [--json FILE]  # judge again, say what differs

At least one run of each topology, of each kind of fault of the three layers, and of each status;
and damaged copies. `make` keeps every verdict in DIR/verdicts; `judge` exits with 1 if one of them
is not the same again: statuses, causes, findings, reasons and words exactly, numbers to nine
digits, the order of tensors aside. Only the commands of the tool are used, so the script outlives
its modules.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = Path(__file__).with_name("stored_programs.py")
PLANNED = ["", "_coarse", "_empty", "_ones", "_primes", "_published", "_ragged", "_square", "_wide"]
PROGRAM_TOPOLOGIES = [
    "context_parallel", "data_parallel", "ddp", "expert_parallel", "fsdp2", "hsdp", "megatron",
    "pipeline", "sequence_parallel", "tensor_parallel", "two_pools",
]  # fmt: skip
PLAN_FAULTS = [
    "avg_on_ci", "faith_on_all_ranks", "skip_block_reduce", "divide_by_ci_count",
    "block_over_ci_size", "drop_message", "imp_local_statistic", "imp_differentiable_sum",
    "times_ci_then_avg", "stale_buffer",
]  # fmt: skip
STEP_FAULTS = [
    "keep_last_microbatch", "divide_by_world", "times_world", "clip_by_local_norm",
    "clip_with_replicas_counted", "clip_on_rank_0", "unsynchronised_init",
]  # fmt: skip
VARIANTS = {
    "data_parallel": [
        "local_mean", "micro_batch_mean", "count_positions", "double_divide", "drop_divide",
        "avg_silently_sum", "drop_return_value", "add_after_reduce", "reduce_on_rank_with_work",
        "first_weight_broadcast",
    ],
    "ddp": ["ddp_average", "sync_first_only"],
    "fsdp2": ["fsdp_average"],
    "sequence_parallel": ["skip_replicated_reduce"],
    "megatron": [
        "bias_before_reduce", "differentiable_bias_over_t", "identity_backward", "sum_backward",
        "non_differentiable_collective", "index_without_offset", "shard_local_size",
    ],
    "pipeline": ["skip_tie_reduce", "count_use_twice"],
    "context_parallel": ["cp_factor", "cp_local_denominator", "gather_without_autograd"],
    "expert_parallel": ["expert_divisor", "aux_scale", "aux_dropped", "local_statistics"],
    "two_pools": ["per_module_dp_mismatch"],
}  # fmt: skip
COLLECTIVES = {
    "data_parallel": [
        "avg", "skip", "double", "subgroup", "copy", "missing_wait", "stale", "early",
        "low_precision", "scale_one",
    ],
    "ddp": ["avg", "missing_wait", "low_precision"],
    "hsdp": ["avg", "skip"],
}  # fmt: skip
OPERATION = {"data_parallel": "allreduce@dp#2", "ddp": "allreduce@dp#1", "hsdp": "allreduce@dp#0"}
MINE = [
    "Right", "Raises", "Killed", "Hangs", "Unseeded", "Broken", "Float32", "OneRow", "Forgotten",
    "Frozen", "Drawn",
]  # fmt: skip
DAMAGE = ["no_reference", "no_rank", "flipped", "no_outcomes", "no_ledger", "no_manifest"]


def cases() -> dict[str, list[str]]:
    """Name of a run -> the arguments of `sumgrad run`."""
    out = {f"clean-three_pool{part}": [f"three_pool{part}"] for part in PLANNED}
    out |= {f"clean-{name}": [name] for name in PROGRAM_TOPOLOGIES}
    out["clean-bfloat16"] = ["three_pool_ones", "--dtype", "bfloat16"]
    out["clean-ddp-bfloat16"] = ["ddp", "--dtype", "bfloat16"]
    for fault in PLAN_FAULTS:
        out[f"plan-{fault}"] = ["three_pool", "--fault", fault]
    out["plan-avg_on_ci-report"] = ["three_pool_square", "--fault", "avg_on_ci", "--law", "report"]
    out["plan-compensated-report"] = ["three_pool_ones", "--fault", "times_ci_then_avg",
                                      "--law", "report"]  # fmt: skip
    out["plan-float32"] = ["three_pool", "--fault", "divide_by_ci_count", "--tiers", "precision"]
    for topology, kinds in COLLECTIVES.items():
        for kind in kinds:
            fault = f"{kind}:{OPERATION[topology]}"
            out[f"collective-{topology}-{kind}"] = [topology, "--fault", fault]
    out["collective-two_pools-drop"] = ["two_pools", "--fault", "drop:recv@world#0"]
    out["collective-enforced"] = ["ddp", "--fault", "avg:allreduce@dp#1", "--law", "enforce"]
    for fault in STEP_FAULTS:
        out[f"step-ddp-{fault}"] = ["ddp", "--fault", fault]
    out["step-fsdp2-divide_by_world"] = ["fsdp2", "--fault", "divide_by_world"]
    for workload, faults in VARIANTS.items():
        for fault in faults:
            out[f"variant-{workload}-{fault}"] = [workload, "--fault", fault]
    for name in MINE:
        timeout = ["--timeout", "12"] if name == "Hangs" else []
        out[f"mine-{name}"] = ["mine.yaml", "--workload", f"{PROGRAMS}:{name}", *timeout]
    return out


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sumgrad", *arguments]


def make(place: Path, only: str | None, jobs: int) -> int:
    (place / "runs").mkdir(parents=True, exist_ok=True)
    (place / "mine.yaml").write_text("name: mine\npools:\n  train: {axes: {dp: 3}}\n")

    def one(name: str, arguments: list[str]) -> str:
        out = place / "runs" / name
        shutil.rmtree(out, ignore_errors=True)
        asked = command("run", *arguments, "--out", str(out), "--quiet")
        done = subprocess.run(
            asked, check=False, capture_output=True, text=True, cwd=place, env=_environment()
        )
        return f"{done.returncode} {name} {(done.stdout + done.stderr).strip()[-200:]}"

    wanted = {n: a for n, a in cases().items() if only is None or only in n}
    with ThreadPoolExecutor(jobs) as pool:
        for line in pool.map(one, wanted, wanted.values()):
            print(line, flush=True)
    if only is None:
        _damage(place)
    shutil.rmtree(place / "verdicts", ignore_errors=True)
    verdicts = _judge_all(place)
    for name, verdict in verdicts.items():
        _write(place / "verdicts" / f"{name}.json", verdict)
    _print_counts(verdicts)
    return 0


def _damage(place: Path) -> None:
    """Copies of two runs, each with one part missing or changed."""
    for source in ("clean-three_pool_ones", "clean-ddp"):
        for kind in DAMAGE:
            copy = place / "runs" / f"damaged-{kind}-{source}"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(place / "runs" / source, copy)
            if kind == "no_reference":
                (copy / "reference_structure_0.safetensors").unlink()
            elif kind == "no_rank":
                (copy / "ranks" / "rank_00001.safetensors").unlink()
            elif kind == "no_outcomes":
                (copy / "outcomes.json").unlink()
            elif kind == "no_ledger":
                (copy / "ranks" / "rank_00001.ledger.jsonl").unlink()
            elif kind == "no_manifest":
                (copy / "manifest.json").unlink()
            else:
                path = min(copy.glob("ranks/grads_*.safetensors"))
                data = bytearray(path.read_bytes())
                data[-5] ^= 64
                path.write_bytes(data)


def _judge_all(place: Path) -> dict[str, dict[str, Any]]:
    """Every stored run's verdict, by its name, as `sumgrad judge` gives it now."""

    def one(run: Path) -> dict[str, Any]:
        done = subprocess.run(
            command("judge", str(run), "--json", "-"),
            check=False, capture_output=True, text=True, cwd=place, env=_environment(),
        )  # fmt: skip
        try:
            verdict: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            verdict = {"words": done.stderr.replace(str(place), "DIR")[-2000:]}
        return _normal({"exit": done.returncode, **verdict})

    runs = sorted((place / "runs").iterdir())
    with ThreadPoolExecutor(2) as pool:
        return dict(zip((run.name for run in runs), pool.map(one, runs), strict=True))


def _normal(verdict: dict[str, Any]) -> dict[str, Any]:
    """Without what may differ: the order of tensors, versions."""
    verdict.pop("versions", None)
    key = ("tier", "step", "pool", "name", "rank")
    if "tensors" in verdict:
        verdict["tensors"].sort(key=lambda t: [str(t.get(k)) for k in key])
    if "coefficients" in verdict:
        verdict["coefficients"].sort(key=lambda c: json.dumps(c, sort_keys=True))
    return verdict


def judge(place: Path, out: Path | None) -> int:
    old = {p.stem: json.loads(p.read_text()) for p in sorted((place / "verdicts").glob("*.json"))}
    new = _judge_all(place)
    rows = []
    for name in sorted(old):
        found = list(differences(old[name], new.get(name, {})))
        status = old[name].get("status", f"exit {old[name]['exit']}")
        rows.append({"run": name, "status": status, "same": not found, "differs": found[:8]})
        if found:
            print(f"differs {name}")
            print("\n".join(f"    {line}" for line in found[:8]))
    bad = [row for row in rows if not row["same"]]
    _print_counts(new)
    print(f"{len(rows)} stored runs judged again, {len(bad)} differ")
    if out:
        counts = Counter(row["status"] for row in rows)
        _write(out, {"command": "scripts/stored_verdicts.py judge DIR", "runs": len(rows),
                     "differ": len(bad), "statuses": dict(counts), "rows": rows})  # fmt: skip
    return 1 if bad else 0


def differences(old: Any, new: Any, where: str = "") -> list[str]:
    """What is not the same, a line each."""
    if isinstance(old, dict) and isinstance(new, dict):
        out = []
        for key in dict.fromkeys([*old, *new]):
            at = f"{where}.{key}"
            if key not in old or key not in new:
                out.append(f"{at}: {'new' if key in new else 'gone'}")
            else:
                out += differences(old[key], new[key], at)
        return out
    if isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            return [f"{where}: {len(old)} before, {len(new)} now: {old[:3]} -> {new[:3]}"]
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True))
                for d in differences(a, b, f"{where}[{i}]")]  # fmt: skip
    numbers = isinstance(old, float) and isinstance(new, float | int)
    if old == new or (numbers and math.isclose(old, new, rel_tol=1e-9, abs_tol=1e-300)):
        return []
    return [f"{where}: {old!r} -> {new!r}"]


def _environment() -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads, "NO_COLOR": "1", "PYTHONPATH": ""}


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def _print_counts(verdicts: dict[str, dict[str, Any]]) -> None:
    print(Counter(v.get("status", f"exit {v['exit']}") for v in verdicts.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=["make", "judge"])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--only", help="make: only runs whose names contain this")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="judge: where the table goes")
    args = parser.parse_args()
    place = args.dir.resolve()
    return make(place, args.only, args.jobs) if args.verb == "make" else judge(place, args.json)


if __name__ == "__main__":
    sys.exit(main())
