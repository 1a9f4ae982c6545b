"""Mutated topologies and damaged run directories, drawn by seed: nothing may crash, hang or pass.

    python scripts/fuzz_inputs.py --out docs/data/fuzz_inputs.json

Either part can run alone (`--directories 0`); the other's figures in the file are kept.

Every input goes through the command line's own `main`. An exit code other than 0 to 3, a traceback,
a message that is no bounded list of lines, more than CPU_LIMIT_S of work, or an exit 0 that was not
earned is a failure and is listed with what drew it. A topology earns `plan`'s 0 by a proof; a
damaged run earns PASS only if the whole run passed and not one byte of what is judged has changed.
Damage to a run that passed must not make it FAIL either, as long as its manifest tells the damage.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sumgrad.cli.main import main as command
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.versions import versions
from sumgrad.topology.shipped import shipped_topologies

CPU_LIMIT_S, WALL_LIMIT_S = 30.0, 900.0  # of one case; a busy machine is no hang
MAX_LINES, MAX_LINE = 40, 1000
NOBODY = 65534
CODES = (0, 1, 2, 3)


class Hung(BaseException):
    """A case worked or waited longer than it may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a command did. seconds: of work here. wrong: why that is a failure, or None."""

    what: str
    code: int
    seconds: float
    wrong: str | None


def run_command(argv: Sequence[str], what: str, *, allowed: Collection[int]) -> Outcome:
    """One call of the command line in this process. allowed: the exit codes that are right."""
    out, err = io.StringIO(), io.StringIO()
    started = time.process_time()
    code, wrong = -1, None
    try:
        with _deadline(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command(argv)
    except Hung:
        wrong = f"took more than {CPU_LIMIT_S:g} s of work or {WALL_LIMIT_S:g} s"
    except BaseException as error:
        wrong = f"{type(error).__name__}: {error}"[:300]
    text = err.getvalue()
    lines = text.splitlines()
    if wrong is None and code not in allowed:
        wrong = f"exit {code} is not one of {allowed}: {text[-300:]}"
    elif wrong is None and "Traceback" in text:
        wrong = f"a traceback: {text[-300:]}"
    elif wrong is None and (len(lines) > MAX_LINES or any(len(line) > MAX_LINE for line in lines)):
        wrong = f"{len(lines)} lines of errors, the longest of {max(map(len, lines))} characters"
    return Outcome(what=what, code=code, seconds=time.process_time() - started, wrong=wrong)


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hung

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, CPU_LIMIT_S),
              (signal.SIGALRM, signal.ITIMER_REAL, WALL_LIMIT_S))  # fmt: skip
    before = [signal.signal(number, stop) for number, _, _ in timers]
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


# ---- topologies ----------------------------------------------------------------------------------

TOKENS = [
    "&a ", "*a", "!!python/object/apply:os.system [ls]", "!!binary ", "<<: ", "? ", "- ", ": ", "{",
    "}", "[", "]", "|\n", ">\n", "#", "%YAML 9.9\n", "---\n", "...\n", "'", '"', "\\", "\t", "\0",
    "\x1b[31m", "\ufeff", "\u2028", "\x85", "é", "\U0001f600", "null", "~", "true", ".nan", ".inf",
    "1e999", "-0", "0x" + "f" * 6000, "9" * 5000, "0b" + "1" * 9000, "1" + ":1" * 3000, "1_000",
    "0o17", "2001-01-01", "2001-99-99", "1000000000", "1048576", "1048577", "-1", "0", "1.5",
    "[" * 2000, "{a: " * 2000, "? " * 2000, "- " * 2000, "{" * 40 + "}" * 40, "[[[[1]]]]: 2",
    "a" * 70000, "  " * 300 + "a: 1\n", "file.py:Class", "os:system", "mine.py:", ":", "x:y:z",
    "three_pool", "ddp", "triton", "{dp: 1048576, tp: 1048576, pp: 1048576}", "{dp: 1000000000}",
    "[0, 0]", "[1048575]", "{role: block, axes: {dp: 1}}", "rows: 1\n", "options: {rows: 10}\n",
    "options: {rows: 1000000000000}\n", "options: {d: 1000000000}\n", "pools: {}\n",
    "plan_only: 1\n",
]  # fmt: skip


def mutate_text(rng: random.Random, text: str) -> str:
    """A topology file with one to four small changes."""
    gentle = (_number, _number, _pool, _options)
    rough = (_insert, _replace, _replace, _cut, _shuffle, _character)
    kinds = rng.choice([gentle, gentle, rough, (*gentle, *rough)])
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(kinds)(rng, text)
    return text


def _number(rng: random.Random, text: str) -> str:
    """Another size somewhere: these files stay valid more often than not."""
    found = list(re.finditer(r"\b\d+\b", text))
    if not found:
        return text
    number = rng.choice([0, 1, 2, 3, 5, 7, 64, 1000, 65563, 1 << 20, 10**9, -1])
    start, end = rng.choice(found).span()
    return f"{text[:start]}{number}{text[end:]}"


def _pool(rng: random.Random, text: str) -> str:
    role, size = rng.choice(["block", "ci", "ppgd", "x"]), rng.choice([1, 2, 3, 7, 30, 1 << 20])
    more = rng.choice(["", f", tp: {rng.randint(1, 4)}", ", rows_per_rank: [1]", ", ranks: [0]"])
    axes = f"axes: {{dp: {size}{more if 'tp' in more else ''}}}{more if '[' in more else ''}"
    return text.rstrip("\n") + f"\n  more{rng.randint(0, 3)}: {{role: {role}, {axes}}}\n"


def _options(rng: random.Random, text: str) -> str:
    name = rng.choice(["rows", "length", "width", "layers", "heads", "mlp", "components", "lengths",
                       "vocabulary", "ci_width", "preset"])  # fmt: skip
    value = rng.choice([1, 2, 3, 8, 29, 500, 4096, 10**7, 10**12, "[1, 2]", "published", "null"])
    return f"options: {{{name}: {value}}}\n{text}"


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(TOKENS) + text[at:]


def _replace(rng: random.Random, text: str) -> str:
    """Another value for one of the keys."""
    values = [m.span(1) for m in re.finditer(r":[ \t]+([^\s{},]+)", text)]
    if not values:
        return _insert(rng, text)
    start, end = rng.choice(values)
    return text[:start] + rng.choice(TOKENS) + text[end:]


def _cut(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + text[at + rng.choice([1, 1, 5, len(text)]) :]


def _shuffle(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(rng.choices(lines, k=len(lines)) if rng.random() < 0.5 else lines + lines[-2:])


def _character(rng: random.Random, text: str) -> str:
    at, high = rng.randrange(len(text) + 1), rng.choice([128, 256, 0x2FFFF])
    swapped = text.replace(rng.choice("{}[]:,\n "), rng.choice("{}[]:,\n #&*!|>%@`"))
    return rng.choice([text[:at] + chr(rng.randrange(high)) + text[at:], swapped])


def fuzz_topologies(count: int, seed: int, place: Path, processes: int = 0) -> list[Outcome]:
    """Mutated topologies through `sumgrad plan`; the first ones each in a process of its own."""
    rng = random.Random(seed)
    sources = [path.read_text() for path in shipped_topologies()]
    outcomes = []
    for number in range(count):
        text = mutate_text(rng, rng.choice(sources))
        path = place / "t.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        argv, what = ["plan", str(path), "--quiet"], f"topology {seed}/{number}"
        apart = number < processes
        run = _run_apart if apart else run_command
        outcomes.append(run(argv, what, allowed=CODES))
        if outcomes[-1].wrong:
            print(f"{what}: {outcomes[-1].wrong}\n{text[:400]!r}", file=sys.stderr)
    return outcomes


def _run_apart(argv: Sequence[str], what: str, *, allowed: Collection[int]) -> Outcome:
    """The same in a process of its own, as a user starts it, with 8 GiB of addresses."""
    limits = {resource.RLIMIT_AS: 8 << 30, resource.RLIMIT_CPU: int(CPU_LIMIT_S)}
    try:
        process = subprocess.run(
            [sys.executable, "-m", "sumgrad", *argv],
            capture_output=True,
            text=True,
            check=False,
            timeout=WALL_LIMIT_S,
            preexec_fn=lambda: [resource.setrlimit(k, (v, v)) for k, v in limits.items()],
        )
        code, text = process.returncode, process.stderr
    except subprocess.TimeoutExpired:
        code, text = -1, f"took longer than {WALL_LIMIT_S:g} s"
    bad = code not in allowed or "Traceback" in text
    wrong = f"exit {code}: {text[-300:]}" if bad else None
    return Outcome(what=what, code=code, seconds=0.0, wrong=wrong)


# ---- run directories -----------------------------------------------------------------------------

# Written down again, not imported: what the harness takes for evidence is part of what is tested.
EVIDENCE = ("run.json", "outcomes.json", "reference_*", "partials_*",
            "ranks/rank_?????.json", "ranks/rank_?????.safetensors",
            "ranks/rank_?????.ledger.jsonl", "ranks/grads_*")  # fmt: skip
Damage = Callable[[random.Random, Path, Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored run and how it was judged when it was whole."""

    name: str
    directory: Path
    passed: bool


def store_runs(place: Path, launcher: Launcher) -> list[Stored]:
    """Runs of both kinds that passed and failed, in both tiers."""
    shipped = {path.stem: path for path in shipped_topologies()}
    wanted = [
        ("three_pool_ones", {}),
        ("three_pool_ones", {"seed": 1}),
        ("three_pool", {"tiers": ("structure",), "steps": 2, "keep_partials": True}),
        ("three_pool_ones", {"fault": "drop_message"}),
        ("ddp", {}),
        ("ddp", {"seed": 1, "tiers": ("structure",)}),
        ("ddp", {"fault": "ddp_average"}),
        ("ddp", {"fault": "avg:allreduce@dp", "tiers": ("structure",)}),  # ranks raise
        ("tensor_parallel", {"tiers": ("structure",)}),
    ]
    runs = []
    for number, (name, flags) in enumerate(wanted):
        out = place / f"{number}_{name}"
        options = CheckOptions(topology=shipped[name], out=out, timeout_s=120, **flags)
        verdict, directory = run_check(options, launcher=launcher)
        runs.append(Stored(name=out.name, directory=directory, passed=verdict.status == "pass"))
    return runs


def evidence(directory: Path) -> dict[str, str]:
    """File -> digest of what is judged; anything that cannot be read is named as such."""
    found = {}
    with contextlib.suppress(PermissionError):  # what cannot be listed is missing from the answer
        for path in [path for pattern in EVIDENCE for path in directory.glob(pattern)]:
            try:
                data = path.read_bytes() if path.is_file() else b"no file"
            except OSError:
                data = b"not to be read"
            found[path.relative_to(directory).as_posix()] = hashlib.sha256(data).hexdigest()
    return found


def draw_file(rng: random.Random, directory: Path) -> Path:
    """Any file of a run."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    own = [p for p in files if "one_rank" not in p.parts and "probe" not in p.parts]
    return rng.choice(own if rng.random() < 0.95 else files)


def _truncate(rng: random.Random, directory: Path, _: Path) -> None:
    path = draw_file(rng, directory)
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) + 1)])


def _flip_bits(rng: random.Random, directory: Path, _: Path) -> None:
    path = draw_file(rng, directory)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 8])):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _delete(rng: random.Random, directory: Path, _: Path) -> None:
    draw_file(rng, directory).unlink()


def _empty(rng: random.Random, directory: Path, _: Path) -> None:
    draw_file(rng, directory).write_bytes(b"")


def _swap(rng: random.Random, directory: Path, _: Path) -> None:
    path = draw_file(rng, directory)
    same = [p for p in path.parent.iterdir() if p.suffixes == path.suffixes and p.is_file()]
    other = rng.choice(same)
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)


def _of_another_run(rng: random.Random, directory: Path, other: Path) -> None:
    names = [p.relative_to(other) for p in other.rglob("*") if p.is_file()]
    for name in rng.sample(sorted(names), rng.randint(1, min(6, len(names)))):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        if not (directory / name).is_dir():
            shutil.copy(other / name, directory / name)


VALUES = [None, True, -1, 0, 10**400, 2**63, 1.5, float("nan"), float("inf"), "", "x", "\ud800",
          "../..", [], {}, [[]], {"a": None}, ["x"] * 3, "NaN", 10**9]  # fmt: skip


def _wrong_json(rng: random.Random, directory: Path, _: Path) -> None:
    path = rng.choice(sorted(p for p in directory.rglob("*.json*") if "one_rank" not in p.parts))
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    at = rng.randrange(len(lines)) if lines else 0
    root = [json.loads(lines[at]) if lines else {}]
    holder, key = root, 0
    while isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.8:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    if rng.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    lines[at : at + 1] = [json.dumps(root[0])]
    path.write_text("\n".join(lines))


def _nested_json(rng: random.Random, directory: Path, _: Path) -> None:
    path = rng.choice(sorted(directory.rglob("*.json*")))
    path.write_text("[" * 200_000 if rng.random() < 0.5 else '{"a":' * 100_000)


def _strange_file(rng: random.Random, directory: Path, other: Path) -> None:
    path = draw_file(rng, directory)
    data = path.read_bytes()
    path.unlink()
    kind = rng.choice(["directory", "pipe", "zero", "loop", "dangling", "copy", "outside"])
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "copy":  # the same content, elsewhere: nothing that is judged has changed
        kept = directory.parent / "kept"
        kept.write_bytes(data)
        path.symlink_to(kept)
    else:
        target = {"zero": Path("/dev/zero"), "loop": path, "dangling": Path("absent"),
                  "outside": other / "run.json"}  # fmt: skip
        path.symlink_to(target[kind])


def _no_permission(rng: random.Random, directory: Path, _: Path) -> None:
    path = rng.choice([draw_file(rng, directory), directory / "ranks", directory])
    path.chmod(0)


def _touch_logs(rng: random.Random, directory: Path, _: Path) -> None:
    names = [p for p in directory.rglob("*") if p.suffix in (".log", ".stack", ".md")]
    path = rng.choice([*names, directory / "verdict.json", directory / "notes.txt"])
    path.write_bytes(rng.randbytes(rng.randrange(2000)))


def _unlisted(rng: random.Random, directory: Path, other: Path) -> None:
    """No list to compare with, and damage beside it: what reads the files must stand alone."""
    (directory / "manifest.json").unlink()
    rng.choice([_wrong_json, _wrong_json, _flip_bits, _truncate, _strange_file, _nested_json,
                _of_another_run])(rng, directory, other)  # fmt: skip


DAMAGES: dict[str, Damage] = {
    "truncated": _truncate,
    "bits flipped": _flip_bits,
    "deleted": _delete,
    "emptied": _empty,
    "swapped": _swap,
    "of another run": _of_another_run,
    "wrong JSON": _wrong_json,
    "nested JSON": _nested_json,
    "no plain file": _strange_file,
    "no permission": _no_permission,
    "logs only": _touch_logs,
    "no manifest": _unlisted,
}


def fuzz_directories(
    count: int, seed: int, runs: Sequence[Stored], place: Path
) -> tuple[list[Outcome], collections.Counter[str]]:
    """Damaged copies of stored runs through `sumgrad judge` and `sumgrad report`."""
    rng = random.Random(seed)
    outcomes, kinds = [], collections.Counter[str]()
    whole = {run.name: evidence(run.directory) for run in runs}
    for number in range(count):
        run, other = rng.sample(list(runs), 2)
        kind = rng.choice(list(DAMAGES))
        directory = place / "case" / "run"
        shutil.copytree(run.directory, directory)
        DAMAGES[kind](rng, directory, other.directory)
        with _as_nobody(kind == "no permission", place):
            earned = run.passed and evidence(directory) == whole[run.name]
            told = run.passed and kind != "no manifest"
            wrong = {0: not earned, 1: told}
            allowed = [code for code in CODES if not wrong.get(code)]
            for verb, *flags in (["judge"], ["report", "--junit", "j.xml", "--html", "h.html"]):
                argv = [verb, str(directory), "--quiet"]
                argv += [str(place / f) if "." in f else f for f in flags]
                what = f"directory {seed}/{number}: {verb} {run.name}, {kind}"
                outcomes.append(run_command(argv, what, allowed=allowed))
                if outcomes[-1].wrong:
                    print(f"{what}: {outcomes[-1].wrong}", file=sys.stderr)
        kinds[kind] += 1
        _remove(place / "case")
    return outcomes, kinds


@contextlib.contextmanager
def _as_nobody(wanted: bool, place: Path) -> Iterator[None]:
    """Permissions hold nobody but root: drop them for a while."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    os.chmod(place, 0o777)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def _remove(path: Path) -> None:
    for folder in [path, *(p for p in path.rglob("*") if p.is_dir() and not p.is_symlink())]:
        folder.chmod(0o755)
    shutil.rmtree(path)


# ---- result --------------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome]) -> dict:
    """Counts by exit code, the slowest case, and every failure."""
    return {
        "commands": len(outcomes),
        "exit_codes": dict(sorted(collections.Counter(str(o.code) for o in outcomes).items())),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "slowest_s": round(max((o.seconds for o in outcomes), default=0.0), 2),
        "failures": [asdict(o) for o in outcomes if o.wrong],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topologies", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=20, help="of these, in their own process")
    parser.add_argument("--directories", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    data = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    ran = {
        "command": " ".join(sys.argv),
        "seed": args.seed,
        "limit_s": CPU_LIMIT_S,
        "machine": machine(),
    }
    with tempfile.TemporaryDirectory(prefix="sumgrad-fuzz-") as name:
        place = Path(name)
        if args.topologies:
            texts = fuzz_topologies(args.topologies, args.seed, place, args.processes)
            data["topologies"] = {
                **ran,
                "in_a_process_of_their_own": args.processes,
                **summary(texts),
            }
        if args.directories:
            with Launcher() as launcher:
                runs = store_runs(place / "runs", launcher)
            damaged, kinds = fuzz_directories(args.directories, args.seed, runs, place)
            whole = {run.name: "pass" if run.passed else "no pass" for run in runs}
            more = {"runs": whole, "damage": dict(kinds)}
            data["directories"] = {**ran, **more, **summary(damaged)}
    if args.out:
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    failures = sum(len(part["failures"]) for part in data.values())
    print(f"{failures} failures in {', '.join(data) or 'nothing'}")
    return 1 if failures else 0


def machine() -> dict:
    """What it ran on."""
    return {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            **versions()}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
