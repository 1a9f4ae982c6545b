"""Are the causes right? Buggy Programs of other hands, each with what a right cause must say.

    python scripts/right_causes.py --half learn --out docs/data/causes_learn.json
    python scripts/right_causes.py --half sealed --out docs/data/causes_sealed.json
    python scripts/right_causes.py --clean --seeds 5

tests/bugs/*.py were written by others who had not seen the diagnosis, expectations before any run.
A number drawn before the first run splits them: one half to learn from, the other run once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from sumgrad.base.errors import UserError
from sumgrad.base.verdict import Verdict
from sumgrad.diagnose.case import Case
from sumgrad.diagnose.explainers.by_modules.in_code.computed import lines_that_differ
from sumgrad.diagnose.explainers.by_modules.in_code.lines import known_lines
from sumgrad.diagnose.explainers.by_modules.rows.rows_used import uneven_rows
from sumgrad.diagnose.modules.autograd.derivatives import no_derivatives
from sumgrad.diagnose.modules.autograd.gives_nothing import give_nothing
from sumgrad.diagnose.modules.in_code.lines import AtLine
from sumgrad.diagnose.modules.in_code.lines_across_ranks import (
    nothing_goes_back,
    only_of_parts,
    picks_by_parts,
    sent_back,
)
from sumgrad.diagnose.modules.weights.weights_used import other_weights
from sumgrad.diagnose.modules.where.first_wrong import (
    first_wrong_backward,
    first_wrong_forward,
    first_wrong_recomputed,
)
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.diagnose.modules.where.loss_weights import same, shares_at_the_loss
from sumgrad.diagnose.names import axis_groups
from sumgrad.launch.again.trace import LOOKING, trace_step
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.record.computed import Computation
from sumgrad.record.directory import load_record
from sumgrad.record.spec import read_spec

ROOT = Path(__file__).resolve().parent.parent
BUGS = ROOT / "tests" / "bugs"
DRAWN = 890391125  # drawn once, before any of them was run
TIMEOUT_S = 120.0


def halves() -> dict[str, list[Path]]:
    """`learn` and `sealed`: by the digest of the drawn number and the name, half of each hand's.

    `second` to `fiftieth`: each of two hands more, or one, written when what came before was
    known; sealed as a whole.
    """
    later = {"second": "cd", "third": "ef", "fourth": "gh", "fifth": "ij", "sixth": "kl",
             "seventh": "m", "eighth": "no", "ninth": "pq", "tenth": "rs",
             "eleventh": "tu", "twelfth": "vw", "thirteenth": "xy",
             "fourteenth": ("z", "aa"), "fifteenth": ("ab", "ac"),
             "sixteenth": ("ad", "ae"), "seventeenth": ("af", "ag"),
             "eighteenth": ("ah", "ai"), "nineteenth": ("aj", "ak"),
             "twentieth": ("al", "am"), "twenty-first": ("an", "ao"),
             "twenty-second": ("ap", "aq"), "twenty-third": ("ar", "as"),
             "twenty-fourth": ("at", "au"), "twenty-fifth": ("av", "aw"),
             "twenty-sixth": ("ax", "ay"), "twenty-seventh": ("az", "ba"),
             "twenty-eighth": ("bb", "bc"), "twenty-ninth": ("bd", "be"),
             "thirtieth": ("bf", "bg"), "thirty-first": ("bh", "bi"),
             "thirty-second": ("bj", "bk"), "thirty-third": ("bl", "bm"),
             "thirty-fourth": ("bn", "bo"),
             "thirty-fifth": ("bp", "bq"), "thirty-sixth": ("br", "bs"),
             "thirty-seventh": ("bt", "bu"), "thirty-eighth": ("bv", "bw"),
             "thirty-ninth": ("bx", "by"), "fortieth": ("bz", "ca"),
             "forty-first": ("cb", "cc"), "forty-second": ("cd", "ce"),
             "forty-third": ("cf", "cg"), "forty-fourth": ("ch", "ci"),
             "forty-fifth": ("cj", "ck"), "forty-sixth": ("cl", "cm"),
             "forty-seventh": ("cn", "co"), "forty-eighth": ("cp", "cq"),
             "forty-ninth": ("cr", "cs"), "fiftieth": ("ct", "cu")}  # fmt: skip
    found: dict[str, list[Path]] = {half: [] for half in ("learn", "sealed", *later)}
    for hand in ("a", "b"):
        paths = sorted(BUGS.glob(f"{hand}_*.py"), key=_place)
        found["learn"] += paths[: len(paths) // 2]
        found["sealed"] += paths[len(paths) // 2 :]
    for half, hand in ((half, hand) for half, hands in later.items() for hand in hands):
        found[half] += BUGS.glob(f"{hand}_*.py")
    return {half: sorted(paths) for half, paths in found.items()}


def _place(path: Path) -> str:
    return hashlib.sha256(f"{DRAWN}/{path.stem}".encode()).hexdigest()


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a file says beside its code."""

    topology: dict[str, Any]
    expected: dict[str, list[str]]
    why: str


def told_by(path: Path) -> Told:
    module = load(path)
    return Told(topology=module.TOPOLOGY, expected=module.EXPECT, why=module.WHY)


def said_by(verdict: Verdict) -> str:
    """What a reader sees of the cause: the leading one, and the evidence under it."""
    if not verdict.diagnoses:  # as where a rank dies of what the ledger shows
        return "\n".join([*verdict.findings, *verdict.reasons]) if verdict.findings else ""
    first = verdict.diagnoses[0]
    lines = [first.cause, *first.because, *first.however]
    return "\n".join([*lines, f"ranks {first.ranks}", f"factor {first.factor} {first.symbol}"])


def marked(said: str, expected: dict[str, list[str]]) -> dict[str, Any]:
    """right: every pattern is there; place: one is; wrong: patterns of false statements."""

    def there(pattern: str) -> bool:
        return re.search(pattern, said, re.IGNORECASE | re.DOTALL) is not None

    return {
        "right": bool(said) and all(there(p) for p in expected["right"]),
        "place": any(there(p) for p in expected["place"]),
        "wrong": [p for p in expected["wrong"] if there(p)],
    }


@contextlib.contextmanager
def asked(path: Path, cls: str, told: Told, **more: Any) -> Iterator[CheckOptions]:
    """How a class of a file is checked, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        topology = Path(folder) / "topology.yaml"
        topology.write_text(yaml.safe_dump(told.topology, sort_keys=False))
        yield CheckOptions(topology=topology, workload=f"{path}:{cls}", timeout_s=TIMEOUT_S,
                           out=Path(folder) / "run", **more)  # fmt: skip


def run(
    path: Path,
    cls: str,
    launcher: Launcher,
    *,
    seed: int = 0,
    told: Told | None = None,
    preload: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """One Program: its verdict and, of a buggy one, the marks of its cause. told: of the file,
    which is not loaded then. preload: as of run_check; more: CheckOptions."""
    told = told or told_by(path)
    looked: list[float] = []  # when what follows a failure began

    def progress(phase: str) -> None:
        if phase == LOOKING:
            looked.append(time.monotonic())

    with asked(path, cls, told, seed=seed, **more) as options:
        began = time.monotonic()
        try:
            verdict, _ = run_check(options, launcher=launcher, progress=progress, preload=preload)
        except UserError as error:
            return {"name": path.stem, "class": cls, "status": "refused", "said": str(error)}
        now = time.monotonic()
    said = said_by(verdict)
    row: dict[str, Any] = {"name": path.stem, "class": cls, "seed": seed,
                           "status": verdict.status, "seconds": round(now - began, 1)}  # fmt: skip
    if looked:
        row["explaining"] = round(now - looked[0], 1)
    first = verdict.diagnoses[0] if verdict.diagnoses else None
    row["kind"] = first.kind if first else None
    row["standing"] = first.standing if first else None
    row |= {"why": told.why, "said": said}
    if verdict.status == "unknown":
        tiers = (r for t in verdict.tiers for r in t.reasons)
        row["said"] = said or "\n".join([*verdict.reasons, *tiers])
    if cls == "Buggy":
        row |= marked(said, told.expected)
    return row


def run_alone(path: Path, cls: str, seed: int, told: Told) -> dict[str, Any]:
    """The same as its users have it: by a process and a fork server of its own."""
    with Launcher() as launcher:
        launcher.wait_ready()
        return run(path, cls, launcher, seed=seed, told=told, preload=True)


def looked_at(path: Path, launcher: Launcher) -> dict[str, Any]:
    """A right twin with eyes on its modules all the same: nothing may look wrong in them."""
    with asked(path, "Clean", told_by(path), tiers=("structure",)) as options:
        verdict, directory = run_check(options, launcher=launcher)
        spec = read_spec(directory)
        trace_step(directory, spec, "structure", 0, launcher=launcher, progress=lambda _: None)
        record = load_record(directory)
        assert record.traces is not None, path
        case = Case(record=record, tier="structure", step=0)
        look = look_at(record.traces, "float64", axis_groups(case))
        params = [name.rpartition(".")[0] for name in record.spec.params]
        found = {
            "forward": first_wrong_forward(look),
            "recomputed": first_wrong_recomputed(look),
            "backward": first_wrong_backward(look, params),
        }
        uneven = uneven_rows(case)
        shares = shares_at_the_loss(look)
    wrong = {kind: f"{one.wrong}: {one.seen[0].shape}" for kind, one in found.items() if one}
    if uneven:
        wrong["rows"] = uneven[0].cause
    gathered = [
        w.name
        for module in look.modules
        for when in ("forward", "backward")
        for w in other_weights(record.traces, module, when)
    ]
    if gathered:
        wrong["gathered"] = str(gathered)
    lines = lines_that_differ(case)
    if lines:
        wrong["lines"] = lines[0].mine.line
    wrong |= lines_that_look_wrong(case)
    weights = [s.factor for s in shares[1]] if shares else []
    if any(f is None for f in weights) or (weights and not same([f for f in weights if f])):
        wrong["weights"] = str(weights)
    told = sum(look.forward(m) == "right" for m in look.modules)
    back = sum(look.backward(m) == "right" for m in look.modules)
    return {"name": path.stem, "class": "Clean", "status": verdict.status, "kind": None,
            "modules": len(look.modules), "forward": told, "backward": back,
            "said": json.dumps(wrong), "wrong": list(wrong)}  # fmt: skip


def lines_that_look_wrong(case: Case) -> dict[str, str]:
    """Of each kind the first line of any rank that would be accused if its gradients were wrong."""
    lines, traces = known_lines(case), case.traces
    if lines is None or traces is None:
        return {}

    def everything(_: Computation) -> bool:
        return True

    def first(rank: int) -> dict[str, Iterable[AtLine]]:
        of_parts = (o for o in lines.first_forward(rank, everything) if only_of_parts(lines, o))
        return {
            "line_back": lines.first_backward(rank, everything),
            "line_kept": lines.kept(rank, everything),
            "line_cut": lines.cuts(rank, everything),
            "line_sent_back": sent_back(lines, rank, [*traces.ranks]),
            "line_picks": picks_by_parts(lines, rank, everything),
            "line_cut_from": nothing_goes_back(lines, rank, everything),
            "line_of_parts": of_parts,
        }

    wrong: dict[str, str] = {}
    for rank in traces.ranks:
        for kind, found in first(rank).items():
            one = next(iter(found), None)
            if one is not None:
                wrong.setdefault(kind, one.mine.line)
    if off := no_derivatives(traces):
        wrong["no_derivatives"] = str([*off])
    nothing = give_nothing(lines)
    if nothing:
        wrong["gives_nothing"] = str([*nothing])
    return wrong


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    paths = [p for half, found in halves().items() if args.half in (half, None) for p in found]
    if args.only:
        paths = [p for p in paths if any(name in p.stem for name in args.only)]
    if args.look:
        with Launcher() as launcher:
            yield from (looked_at(path, launcher) for path in paths)
        return
    cls, seeds = ("Clean", args.seeds) if args.clean else ("Buggy", 1)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for path in paths:
            told = told_by(path)
            for seed in range(seeds):
                yield pool.submit(run_alone, path, cls, seed, told).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--half", choices=tuple(halves()))
    parser.add_argument("--only", action="append", help="part of a name")
    parser.add_argument("--clean", action="store_true", help="the right twins: no cause, no alarm")
    parser.add_argument("--look", action="store_true", help="the right twins, module by module")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="print what is said in full")
    args = parser.parse_args()
    rows = []
    for row in rows_of(args):
        rows.append(row)
        mark = "" if args.clean else "RIGHT" if row.get("right") else "-----"
        false = f" FALSE {row['wrong']}" if row.get("wrong") else ""
        place = " place" if row.get("place") else ""
        print(f"{row['name']:42} {row['status']:8} {mark}{place}{false} [{row.get('kind')}]",
              flush=True)  # fmt: skip
        if args.show:
            print("   WHY ", row.get("why"), "\n   SAID", row["said"].replace("\n", "\n        "))
    head = _head(rows, clean=args.clean or args.look)
    print(json.dumps(head))
    if args.out:
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0


def _head(rows: list[dict[str, Any]], *, clean: bool) -> dict[str, Any]:
    status = {s: sum(r["status"] == s for r in rows) for s in ("pass", "fail", "unknown")}
    if clean:
        causes = sum(r.get("kind") is not None for r in rows)
        return {"drawn": DRAWN, "programs": len(rows), **status, "causes": causes}
    failed = [r for r in rows if r["status"] == "fail"]
    return {
        "drawn": DRAWN,
        "programs": len(rows),
        **status,
        "right": sum(bool(r.get("right")) for r in failed),
        "right_and_place": sum(bool(r.get("right") and r.get("place")) for r in failed),
        "with_false_statement": sum(bool(r.get("wrong")) for r in failed),
        "open": sum(r.get("kind") == "open" for r in failed),
        "explaining_in_failing_runs": _cost(failed),
    }


def _cost(failed: list[dict[str, Any]]) -> dict[str, float]:
    """What explaining took, in the seconds of the failing run before it."""
    told = [r for r in failed if "explaining" in r]
    ratios = [r["explaining"] / max(r["seconds"] - r["explaining"], 0.1) for r in told]
    if not ratios:
        return {}
    return {"median": round(statistics.median(ratios), 2), "most": round(max(ratios), 2)}


if __name__ == "__main__":
    sys.exit(main())
