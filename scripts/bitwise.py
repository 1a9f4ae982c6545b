"""Exact bits on every shipped topology, and beside them how many other sums get right.

    python scripts/bitwise.py --seeds 3 --out docs/data/bitwise.json
    python scripts/bitwise.py --only published small_square spread --kernels triton --steps 1
    python scripts/bitwise.py --clean 200            # runs with nothing planted

Each run is the bitwise tier on real ranks; what is counted is what every rank held, by kind.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from sumgrad import __version__
from sumgrad.judge.checks.bitwise import compared_bits, expected_names
from sumgrad.judge.knowledge import known_plan
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.record.bits import BITS, KINDS, ROWS, kind_of
from sumgrad.record.directory import Record, load_record
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
TOPOLOGIES = ("three_pool", "published", "square", "ragged", "primes", "ones", "empty", "coarse",
              "wide")  # fmt: skip
ONE_RANK_EACH = """name: one_rank_each
workload: three_pool
options: {preset: published}
pools:
  ci: {axes: {dp: 1}}
  block: {role: block, axes: {dp: 1}}
  ppgd: {axes: {dp: 1}}
"""
SMALL = {  # at the published size
    "spread": """name: spread
workload: three_pool
options: {preset: published, rows: 7, lengths: [3, 2, 3, 1, 3, 3, 2]}
pools:
  ci: {axes: {dp: 3}}
  block0: {role: block, axes: {dp: 2}}
  block1: {role: block, axes: {dp: 5}}
  ppgd: {axes: {dp: 4}}
""",
    "small_square": """name: small_square
workload: three_pool
options: {preset: published}
pools:
  ci: {axes: {dp: 2}}
  block0: {role: block, axes: {dp: 2}}
  block1: {role: block, axes: {dp: 2}}
  ppgd: {axes: {dp: 2}}
""",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--dtypes", nargs="*", default=("float32", "float64"))
    parser.add_argument("--kernels", choices=("fixed", "triton"), default="fixed")
    parser.add_argument("--clean", type=int, default=0, metavar="RUNS")
    parser.add_argument("--sums", action="store_true", help="only the table of plain sums")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with Launcher() as launcher, tempfile.TemporaryDirectory() as place:
        if args.clean:
            return clean(launcher, Path(place), args.clean)
        rows = [] if args.sums else exact(launcher, Path(place), args)
        sums = plain_sums(launcher, Path(place)) if args.sums or not args.only else []
    if args.out:
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        key = f"runs_{args.kernels}"
        data = {**known, "sumgrad": __version__, "torch": torch.__version__}
        data |= {key: rows} if rows else {}
        data |= {"plain_sums": sums} if sums else {}
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    return int(any(row["status"] != "pass" for row in rows))


def topology(name: str, place: Path) -> Path:
    """A shipped one by its short name, or one of SMALL."""
    if name in SMALL:
        path = place / f"{name}.yaml"
        path.write_text(SMALL[name])
        return path
    full = name if name.startswith("three_pool") else f"three_pool_{name}"
    return ROOT / "topologies" / f"{full}.yaml"


def exact(launcher: Launcher, place: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every topology, dtype and seed."""
    out = []
    for name in args.only or TOPOLOGIES:
        for dtype in args.dtypes:
            for seed in range(args.seeds):
                began = time.monotonic()
                options = CheckOptions(
                    topology=topology(name, place), out=place / f"{len(out)} {name}", seed=seed,
                    dtype=dtype, tiers=(BITS,), steps=args.steps, timeout_s=1800,
                    kernels=args.kernels,
                )  # fmt: skip
                verdict, directory = run_check(options, launcher=launcher)
                record = load_record(directory)
                row = {
                    "topology": name, "dtype": dtype, "seed": seed, "steps": args.steps,
                    "ranks": record.spec.topology.world_size, "status": verdict.status,
                    **compared_bits(record).to_json(), "elements_by_kind": by_kind(record),
                    "seconds": round(time.monotonic() - began, 1),
                }  # fmt: skip
                out.append(row)
                print(name, dtype, seed, row["status"], f"{row['differing']} of {row['elements']}",
                      f"{row['seconds']} s", flush=True)  # fmt: skip
    return out


def by_kind(record: Record) -> dict[str, list[int]]:
    """Kind -> elements that differ, elements that were held, over all ranks and steps."""
    plan, all_of, other = known_plan(record), Counter[str](), Counter[str]()
    for step, single in enumerate(record.bits):
        for rank, held in record.ranks.items():
            a, b = plan.rows(rank)
            for name in expected_names(plan, rank):
                kind, whole = kind_of(name), single.tensors[name]
                wanted = whole[a:b] if kind in ROWS else whole
                all_of[kind] += wanted.numel()
                other[kind] += differing(held.grads[BITS, step][name], wanted)
    return {kind: [other[kind], all_of[kind]] for kind in KINDS if all_of[kind]}


def differing(got: Tensor, wanted: Tensor) -> int:
    """Elements with other bits."""
    kind = torch.int64 if got.element_size() == 8 else torch.int32
    return int((got.contiguous().view(kind) != wanted.contiguous().view(kind)).sum())


def plain_sums(launcher: Launcher, place: Path) -> list[dict[str, Any]]:
    """The published workload on (4; 2, 2; 2) against one rank each, by SUM: what people have."""
    alone = place / "one.yaml"
    alone.write_text(ONE_RANK_EACH)
    out = []
    for kernels in ("torch", "triton"):
        held = []
        for path in (alone, ROOT / "topologies" / "three_pool_published.yaml"):
            options = CheckOptions(
                topology=path, out=place / f"{kernels} {path.stem}", tiers=("precision",), steps=1,
                kernels=kernels, timeout_s=1800,
            )  # fmt: skip
            _, directory = run_check(options, launcher=launcher)
            record = load_record(directory)
            home = [p.ranks[0] for p in record.spec.topology.pools if p.role != "ppgd"]
            grads = [record.ranks[rank].grads["precision", 0] for rank in home]
            held.append({name: grad for own in grads for name, grad in own.items()})
        names = list(held[0])
        other = {name: differing(held[0][name], held[1][name]) for name in names}
        row = {
            "kernels": kernels, "tensors": len(names),
            "differing_tensors": sum(bool(n) for n in other.values()),
            "elements": sum(held[0][name].numel() for name in names),
            "differing": sum(other.values()),
        }  # fmt: skip
        out.append(row)
        print("plain SUM,", kernels, "kernels:", row, flush=True)
    return out


def clean(launcher: Launcher, place: Path, runs: int) -> int:
    """Nothing is planted; the exit code is 1 if any run does not pass."""
    names = [name for name in TOPOLOGIES if name != "wide"]
    bad = 0
    for i in range(runs):
        name = names[i % len(names)]
        options = CheckOptions(
            topology=topology(name, place), out=place / f"{i}", seed=1000 + i, tiers=(BITS,),
            steps=1, timeout_s=600,
        )  # fmt: skip
        verdict, _ = run_check(options, launcher=launcher)
        bad += verdict.status != "pass"
        print(i, name, verdict.status, f"{bad} bad so far", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
