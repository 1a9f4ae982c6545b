"""Mutants of what decides: does a test notice when a check is made wrong?

    scripts/mutants                              # all of them; writes docs/data/mutants.json
    scripts/mutants --only harness/judge/comparison.py    # those of some modules, printed
    scripts/mutants --written                    # those written by hand
    scripts/mutants --seed 2                     # another draw: nobody has looked at these
    scripts/mutants --like TABLE --out FILE      # those of a stored table, wherever they are now

Each mutant is one small wrong version of one function: written by hand in mutants.yaml, or drawn
from those that mutant_operators knows, evenly over modules and functions. It runs in a child
forked from this process, which has imported torch, Triton and pytest but nothing of sumgrad: an
import hook serves the changed source, and the tests nearest to its module run until the first that
fails. A mutant that no test kills survives, and needs a reason in mutants.yaml.

Why not mutmut: it changes the bodies of undecorated functions only, so no Triton kernel, property
or tolerance (a constant of a module), and it takes a module's name from its path, while harness/ is
imported as sumgrad. cosmic-ray starts a process and imports torch for each mutant; mutatest is no
longer kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutant_operators as operators
import yaml
from mutant_child import Killed, prepare, run_tests
from mutant_operators import Change

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("mutants.yaml")
OUT = ROOT / "docs" / "data" / "mutants.json"
NUM_DRAWN = 155


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One wrong version of one module. path: from the root; written: by hand, not drawn."""

    path: str
    change: Change
    what: str
    written: bool

    @property
    def key(self) -> str:
        """The same wherever its lines are now; survivors' reasons are found by it."""
        return f"{Path(self.path).stem}-{self.change.key}"

    @property
    def source(self) -> str:
        return operators.apply((ROOT / self.path).read_text(), self.change)


def module_name(path: str) -> str:
    """The import name of a file of the project."""
    folder, *rest = Path(path).with_suffix("").parts
    return ".".join(["sumgrad"] + ([folder] if folder != "harness" else []) + rest)


def load_table() -> dict[str, Any]:
    """mutants.yaml: modules and their tests, mutants written by hand, reasons of survivors."""
    table: dict[str, Any] = yaml.safe_load(TABLE.read_text())
    return table


def written_mutants(table: dict[str, Any]) -> list[Mutant]:
    """Those written by hand. LookupError where a snippet is not there exactly once."""
    out = []
    for path, entries in table["written"].items():
        source = (ROOT / path).read_text()
        for entry in entries:
            start, end = operators.function_source(source, entry["in"])
            data, before = source.encode(), entry["from"].encode()
            times = data[start:end].count(before)
            if times != 1:
                raise LookupError(f"{path}, {entry['in']}: {times} times, expected once: "
                                  f"{entry['from']!r}")  # fmt: skip
            at = data.index(before, start, end)
            change = Change(
                function=entry["in"], operator="written by hand", before=entry["from"],
                after=entry["to"], start=at, end=at + len(before),
            )  # fmt: skip
            out.append(Mutant(path=path, change=change, what=entry["what"], written=True))
    return out


def drawn_mutants(table: dict[str, Any], num: int, seed: int) -> list[Mutant]:
    """`num` mutants, as many of each module as it has, as many of each function as it has.

    The order is that of a hash of seed and change: new code elsewhere draws no other mutants here.
    Those that mostly crash come last in their function: any test kills them.
    """
    queues: dict[str, list[Mutant]] = {}
    for path in table["modules"]:
        by_function: dict[str, list[Mutant]] = {}
        for change in operators.changes((ROOT / path).read_text()):
            if change.function in table["not_here"].get(path, {}):
                continue
            mutant = Mutant(path=path, change=change, what=change.operator, written=False)
            by_function.setdefault(change.function, []).append(mutant)
        for mutants in by_function.values():
            mutants.sort(key=lambda m: (m.what in operators.CRASHES, _order(seed, m.key)))
        names = sorted(by_function, key=lambda name: _order(seed, f"{path}:{name}"))
        rounds = max(len(mutants) for mutants in by_function.values())
        queues[path] = [
            by_function[name][i]
            for i in range(rounds)
            for name in names
            if i < len(by_function[name])
        ]
    out: list[Mutant] = []
    for i in range(max(len(queue) for queue in queues.values())):
        out += [queue[i] for queue in queues.values() if i < len(queue)]
    return out[:num]


def like_mutants(table: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[list[Mutant], list]:
    """The drawn mutants of a stored table as they are now, and the rows whose code is gone.

    The same change of a function of the same name, in whatever file; else the only one that makes
    the same change anywhere.
    """
    by_key: dict[str, Mutant] = {}
    by_text: dict[tuple[str, str, str], list[Mutant]] = {}
    for path in table["modules"]:
        for change in operators.changes((ROOT / path).read_text()):
            mutant = Mutant(path=path, change=change, what=change.operator, written=False)
            by_key.setdefault(change.key, mutant)
            text = (change.operator, change.before, change.after)
            by_text.setdefault(text, []).append(mutant)
    out, gone = [], []
    for row in rows:
        if row["operator"] == "written by hand":
            continue
        anywhere = by_text.get((row["operator"], row["from"], row["to"]), [])
        found = by_key.get(row["key"].rpartition("-")[2])
        if found is None and len(anywhere) == 1:
            found = anywhere[0]
        if found is None:
            gone.append(row)
        else:
            out.append(found)
    return out, gone


def _order(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}:{text}".encode()).hexdigest()


def check_green(table: dict[str, Any], paths: list[str]) -> dict[str, float]:
    """Seconds of each module's test files without a mutant. SystemExit where they are not green."""
    seconds: dict[str, float] = {}
    known: dict[tuple[str, ...], float] = {}
    for path in paths:
        tests = tuple(t for t in table["modules"][path] if t.startswith("tests/"))  # and no -k
        if tests in known:
            seconds[path] = known[tests]
            continue
        found = run_tests([*tests, *table["always"]], None, timeout_s=900)
        if found.by is not None:
            sys.exit(f"{path}: its tests are not green without a mutant: {found.by}\n{found.words}")
        seconds[path] = known[tests] = found.seconds
        print(f"green  {path}: {found.seconds:.1f} s, {found.num_tests} tests", flush=True)
    return seconds


def run_one(mutant: Mutant, table: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The row of one mutant. seconds: what its tests take without it."""
    tests = table["modules"][mutant.path] + table["always"]
    change = (module_name(mutant.path), ROOT / mutant.path, mutant.source)
    found: Killed = run_tests(tests, change, timeout_s=20 + 5 * seconds)
    status = "timeout" if found.timed_out else "killed" if found.by else "survived"
    row = {
        "key": mutant.key, "module": mutant.path, "function": mutant.change.function,
        "operator": mutant.change.operator, "what": mutant.what, "from": mutant.change.before,
        "to": mutant.change.after, "status": status, "by": found.by,
        "seconds": round(found.seconds, 2),
    }  # fmt: skip
    if status == "survived":
        row["reason"] = table["survivors"].get(mutant.key)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", help="a module's path or its stem")
    parser.add_argument("--written", action="store_true", help="only those written by hand")
    parser.add_argument("--num", type=int, default=NUM_DRAWN, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--like", type=Path, help="the drawn ones of this stored table")
    parser.add_argument("--key", action="append", help="only mutants of these keys")
    parser.add_argument("--again", action="store_true", help="only those not killed before")
    parser.add_argument("--list", action="store_true", help="print them and run nothing")
    parser.add_argument("--out", type=Path, default=None, help="where the table goes")
    args = parser.parse_args()
    table = load_table()
    mutants = written_mutants(table)
    if args.like:
        found, gone = like_mutants(table, json.loads(args.like.read_text())["rows"])
        mutants += list({m.key: m for m in found}.values())
        print(f"{len(found)} of the stored mutants are here, the code of {len(gone)} is gone")
        for row in gone:
            print(f"gone {row['key']} {row['module']} {row['function']}: {_short(row['from'])}")
    elif not args.written:
        mutants += drawn_mutants(table, args.num, args.seed)
    chosen = args.only or args.written or args.key or args.list or args.like
    whole = not chosen and args.seed == 1
    if args.only:
        mutants = [m for m in mutants if m.path in args.only or Path(m.path).stem in args.only]
    if args.key:
        mutants = [m for m in mutants if m.key in args.key]
    if args.list:
        for m in mutants:
            change = f"{m.change.before!r} -> {m.change.after!r}"
            print(f"{m.key}  {m.path} {m.change.function}: {change}")
        return 0
    out = args.out or (OUT if whole else None)
    rows = _stored(out or OUT) if args.again else {}
    rows = {m.key: rows[m.key] for m in mutants if m.key in rows}
    for row in _run([m for m in mutants if m.key not in rows], table):
        rows[row["key"]] = row
        if out:
            _write(out, list(rows.values()), args.seed)  # so that --again can go on from here
    return _report([rows[m.key] for m in mutants], out, args.seed)


def _stored(out: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run: what was killed stays killed while tests are only added."""
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    return {row["key"]: row for row in rows if row["status"] != "survived"}


def _run(mutants: list[Mutant], table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        prepare(ROOT, Path(scratch))
        seconds = check_green(table, list(dict.fromkeys(m.path for m in mutants)))
        for i, mutant in enumerate(mutants):
            row = run_one(mutant, table, seconds[mutant.path])
            print(f"{i + 1}/{len(mutants)} {row['status']:8} {row['seconds']:5.1f} s  {row['key']} "
                  f"{row['module']} {row['function']}: {_short(row['from'])} -> {_short(row['to'])}"
                  f"  [{row['by'] or ''}]", flush=True)  # fmt: skip
            yield row


def _short(text: str) -> str:
    return " ".join(text.split())[:90]


def _write(out: Path, rows: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Write the table; returns its head. seconds: of all rows together."""
    counts = {s: sum(r["status"] == s for r in rows) for s in ("killed", "timeout", "survived")}
    open_ones = [r for r in rows if r["status"] == "survived" and not r["reason"]]
    seconds = sum(row["seconds"] for row in rows)
    share = counts["survived"] / max(1, len(rows))
    head = {
        "command": "scripts/mutants" + (f" --seed {seed}" if seed != 1 else ""),
        "machine": {"processor": platform.processor() or platform.machine(),
                    "cores": os.cpu_count(), "python": platform.python_version()},
        "seconds": round(seconds, 1), "mutants": len(rows), **counts,
        "survived_share": round(share, 4), "survived_without_reason": len(open_ones),
    }  # fmt: skip
    part = out.with_suffix(".part")
    part.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    part.replace(out)
    return head


def _report(rows: list[dict[str, Any]], out: Path | None, seed: int) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        head = _write(out or Path(scratch) / "table.json", rows, seed)
    print(json.dumps(head))
    for row in rows:
        if row["status"] == "survived":
            print(f"survived {row['key']} {row['module']} {row['function']}: {row['from']!r} -> "
                  f"{row['to']!r}: {row['reason'] or 'NO REASON'}")  # fmt: skip
    return 1 if head["survived_without_reason"] else 0


if __name__ == "__main__":
    sys.exit(main())
