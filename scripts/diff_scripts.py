"""`sumgrad diff` on scripts that know nothing of it: right ones over seeds, and real mistakes.

    python scripts/diff_scripts.py --seeds 5 --out docs/data/diff_scripts.json
    python scripts/diff_scripts.py --only ddp nanogpt

Needs `pip install -e .[examples]` for accelerate, transformers and lightning.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sumgrad import __version__

SCRIPTS = Path(__file__).resolve().parent.parent / "examples" / "scripts"
SAME = 0.02  # of a loss: curves that are as near are taken for the same


@dataclass(frozen=True, kw_only=True)
class Page:
    """A script, how it is given its rows and its seed, and its mistakes with where each begins."""

    name: str
    ranks: int = 3
    words: tuple[str, ...] = ()
    needs: str = "torch"
    bugs: dict[str, int] = field(default_factory=dict)
    by_environment: bool = False
    starts_its_own: bool = False

    def command(self, seed: int, bug: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The words behind `sumgrad diff`, and what the environment has besides."""
        script = str(SCRIPTS / f"{self.name}.py")
        if self.starts_its_own:
            end = " bug" if bug else ""
            sides = [f"{sys.executable} {script} {n} {folder}/meet{end}" for n in (self.ranks, 1)]
            return ["--a", sides[0], "--b", sides[1]], {}
        words = ["--ranks", str(self.ranks), "--", script, *self.words]
        if self.by_environment:
            return words, {"SEED": str(seed), "BUG": bug}
        return [*words, "--seed", str(seed), *(["--bug", bug] if bug else [])], {}


PAGES = (
    Page(
        name="ddp",
        words=("--batch", "{12/ranks}"),
        bugs={
            "same rows": 0, "unequal start": 0, "learning rate by world size": 0,
            "never synchronised": 0, "divided by world size again": 0, "reduced again": 0,
            "decay twice": 1,
        },
    ),
    Page(name="nanogpt", by_environment=True, bugs={"divided by all": 0}),
    Page(name="fsdp2", bugs={"not divided": 0, "clip by the norm of a shard": 0}),
    Page(name="fsdp1", bugs={"rows of another step": 1}),
    Page(name="tensor_parallel", bugs={"norm reduced again": 0}),
    Page(
        name="megatron_by_hand",
        bugs={"gradient not reduced": 0, "gradient reduced again": 0, "bias on every rank": 0},
    ),
    Page(
        name="titan", ranks=4, bugs={"tokens of one rank": 0, "clip by the norm of a shard": 0}
    ),
    Page(name="gan", starts_its_own=True, bugs={"bug": 1}),
    Page(
        name="accelerate_loop", needs="accelerate", words=("--batch", "{12/ranks}"),
        bugs={"multiplied by world size": 0},
    ),
    Page(
        name="trainer", needs="transformers", words=("--batch", "{12/ranks}"),
        bugs={"a mean of means": 0},
    ),
    Page(name="lightning_loop", needs="lightning", words=("--batch", "{12/ranks}")),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for page in PAGES:
        if args.only and page.name not in args.only:
            continue
        if importlib.util.find_spec(page.needs) is None:
            print(f"{page.name:18} left out: no {page.needs}")
            continue
        for seed, bug in _runs(page, args):
            row = run(page, seed, bug)
            rows.append(row)
            print(f"{page.name:18} seed {seed} {bug or 'right':30} {_line(row)}", flush=True)
    wrong = [r for r in rows if (r["status"] != "pass") != bool(r["bug"]) or not r["right_step"]]
    counts = {
        "right": sum(not r["bug"] for r in rows),
        "right_passed": sum(r["status"] == "pass" for r in rows if not r["bug"]),
        "bugs": sum(bool(r["bug"]) for r in rows),
        "bugs_failed": sum(r["status"] == "fail" for r in rows if r["bug"]),
        "bugs_at_their_first_step": sum(r["right_step"] for r in rows if r["bug"]),
        "bugs_with_the_same_losses": sum(r["losses_alike"] for r in rows if r["bug"]),
    }
    print(json.dumps(counts))
    if args.out:
        data = {"sumgrad": __version__, **counts, "rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    return bool(wrong)


def _runs(page: Page, args: argparse.Namespace) -> Iterator[tuple[int, str]]:
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    yield from ((seed, "") for seed in seeds)
    yield from ((args.first_seed, bug) for bug in page.bugs)


def run(page: Page, seed: int, bug: str) -> dict[str, Any]:
    """One diff, and what it says."""
    with tempfile.TemporaryDirectory() as place:
        words, more = page.command(seed, bug, Path(place))
        command = [sys.executable, "-m", "sumgrad", "diff", "--json", "v.json", *words]
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=place, env={**os.environ, **more}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        seconds = time.monotonic() - began
        path = Path(place) / "v.json"
        if not path.exists():
            raise RuntimeError(done.stdout + done.stderr)
        verdict = json.loads(path.read_text())
    failed = [t for t in verdict["tensors"] if t["status"] == "fail"]
    cause = (verdict["diagnoses"] or [{"cause": None, "standing": None}])[0]
    first = min((t["step"] for t in failed), default=None)
    if first is None and bug and verdict["status"] == "fail":
        first = 0 if "step 0" in str(cause) or "start" in str(cause) else None
    losses = verdict["losses"]
    alike = [
        a is not None and b is not None and abs(a - b) <= SAME * abs(a)
        for a, b in zip(losses["single"], losses["ranks"], strict=False)
    ]
    return {
        "script": page.name,
        "seed": seed,
        "bug": bug,
        "status": verdict["status"],
        "first_step": first,
        "right_step": not bug or first == page.bugs[bug],
        "tensors": sorted({t["name"] for t in failed if t["step"] == first})[:3],
        "ranks": sorted({t["rank"] for t in failed if t["step"] == first}),
        "worst_of_threshold": {n: t["worst_of_threshold"] for n, t in verdict["tiers"].items()},
        "cause": cause["cause"],
        "standing": cause["standing"],
        "losses": losses,
        "losses_alike": all(alike),
        "seconds": round(seconds, 1),
    }


def _line(row: dict[str, Any]) -> str:
    where = f" from step {row['first_step']}" if row["first_step"] is not None else ""
    return f"{row['status'].upper()}{where} {row['cause'] or ''}"[:110]


if __name__ == "__main__":
    sys.exit(main())
