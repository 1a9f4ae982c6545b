"""Drawn kills and signals: whom, when and how, in whole runs of the command.

    python scripts/kills.py --count 200 --seed 0 --out docs/data/kills.json

Each case is one run with a TMPDIR of its own. A workload of ours pauses in the drawn process at the
drawn place, so that the signal strikes there. `stop` is SIGSTOP and SIGKILL a moment later; `stay`
leaves the process stopped (the command itself is killed after two seconds). Needs Linux.

What every case must show:

- No PASS that is not earned. Not earned: a rank, its reference or its probe was struck by a signal
  that ends or stops it, at any time before its process was gone, also after its last write; the
  fork server was struck while a job ran; the command or its group was struck before it had printed
  its last line. Earned is it where nobody was harmed: ranks and the server ignore SIGINT, which is
  meant for the command; a server that is struck while nothing runs is replaced (`faults` runs many
  jobs, and one that was struck in a job is counted as crashed). Under torchrun the command is
  torchrun's agent: its ranks are told to end or go on without it, what they say is theirs, its
  exit code is its own; ranks that have finished ignore SIGTERM there, by which an agent that lost
  one rank would end the one that judges.
- No FAIL: nothing is wrong with what is run. (`faults` fails by saying who crashed.)
- No traceback on standard error (of torchrun's own there are some; none may name our files), and
  an exit code of ours, or 128 + n or -n where the command itself was struck.
- The command ends within its limit; within a grace time after it no process of the run is left,
  and nothing in TMPDIR (but torch's own cache; under torchrun: nothing of ours).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sumgrad.launch.local.processes import children_of
from sumgrad.topology.shipped import topologies_directory

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 10
GRACE_S = 20.0
SIGNALS = ("KILL", "TERM", "INT", "SEGV", "ABRT", "HUP", "stop", "stay")
WEIGHTS = (20, 18, 14, 12, 8, 10, 10, 4)
HARMLESS = {"rank": ("INT",), "helper": ("INT",), "server": ("INT",)}
# A background shell ignores SIGINT, nohup SIGHUP, and what is ignored is inherited.
AS_IN_A_TERMINAL = ("env", "--default-signal=INT,HUP")
PLACES = ("step", "writes", "exit")
WHO_WHEN = {
    "run": {
        "rank": ("start", *PLACES),
        "helper": PLACES,
        "server": ("import", "start", *PLACES, "judging"),
        "main": ("import", "start", *PLACES, "judging"),
        "group": ("import", "start", *PLACES, "judging"),
    },
    "torchrun": {"rank": PLACES, "main": ("step", "writes"), "group": ("step",)},
    "faults": {"rank": ("start",), "server": ("start",), "main": ("start",), "group": ("start",)},
}
RANKS = {"three_pool": 4, "ddp": 3, "torchrun": 4, "faults": 3}
WORKLOAD = '''
import atexit, os, sys, time
from pathlib import Path

import sumgrad.launch.guard
import torch.distributed as dist
from sumgrad.workloads.programs.ddp import DDP
from sumgrad.workloads.three_pool.workload import ThreePool

PHASE, WHO, MARK = (os.environ["KILLS_" + name] for name in ("PHASE", "WHO", "MARK"))
armed = []

def pause(phase):
    if phase == PHASE and not os.path.exists(MARK):
        Path(MARK + ".new").write_text(str(os.getpid()))
        os.replace(MARK + ".new", MARK)
        time.sleep(1.5)

def here():
    """A rank, or a reference or probe beside them, is inside the user's code."""
    who = str(dist.get_rank()) if dist.is_initialized() else "helper"
    if who != WHO or "sumgrad.cli.main" in sys.modules and who == "helper":
        return
    if not armed:
        armed.append(who)
        write = sumgrad.launch.guard.write_json
        def write_later(path, data):
            pause("writes")
            write(path, data)
        sumgrad.launch.guard.write_json = write_later
        atexit.register(pause, "exit")
    pause("step")

class Planned(ThreePool):
    def formulas(self, dtype, device, **more):
        here()
        return super().formulas(dtype, device, **more)

class Stepped(DDP):
    def loss_sum(self, model, rows):
        here()
        return super().loss_sum(model, rows)
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """who: rank, helper (a reference; of a Program its probe), server, main, group.

    rank: which rank pauses. delay: of the longest wait where nobody pauses, 0 to 1.
    """

    number: int
    subject: str
    who: str
    when: str
    signal: str
    rank: int
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What became of a case. struck: whether there was somebody to strike; said: by then."""

    case: Case
    struck: bool
    said: str
    exit_code: int | None
    last_line: str
    seconds: float
    problems: tuple[str, ...]


def draw(seed: int, count: int) -> list[Case]:
    """The same cases for the same seed."""
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        subject = rng.choices(("three_pool", "ddp", "torchrun", "faults"), (52, 36, 7, 5))[0]
        places = WHO_WHEN.get(subject, WHO_WHEN["run"])
        who = rng.choice(list(places))
        kind = rng.choices(SIGNALS, WEIGHTS)[0]
        if kind == "stay" and (subject == "torchrun" or who == "helper"):
            kind = "stop"  # minutes, for what a stopped rank shows in seconds
        when = rng.choice(places[who])
        if kind == "stay" and when == "import":
            kind = "stop"
        rank = rng.randrange(RANKS[subject])
        cases.append(
            Case(
                number=number, subject=subject, who=who, when=when, signal=kind, rank=rank,
                delay=rng.random(),
            )
        )  # fmt: skip
    return cases


def command_of(case: Case, place: Path) -> list[str]:
    """The command line of a case. place: its directory."""
    file = place / "paused.py"
    file.write_text(WORKLOAD)
    name = "Stepped" if case.subject in ("ddp", "faults") else "Planned"
    topology = "ddp" if name == "Stepped" else "three_pool_ones"
    path = str(topologies_directory() / f"{topology}.yaml")
    flags = ["--workload", f"{file}:{name}", "--timeout", str(TIMEOUT_S)]
    if case.subject == "faults":
        return [sys.executable, "-m", "sumgrad", "faults", path, "--quick", *flags]
    flags += ["--out", str(place / "out")]
    if case.subject != "torchrun":
        return [sys.executable, "-m", "sumgrad", "run", path, *flags]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    script = str(ROOT / "harness" / "run.py")
    return [sys.executable, *start, script, "--topology", path, *flags]


def run_case(case: Case, place: Path) -> Seen:
    """Run one case in an empty directory."""
    temporary = place / "tmp"
    temporary.mkdir()
    who = "helper" if case.who == "helper" else str(case.rank)
    tag = f"{os.getpid()}-{case.number}"
    environment = {
        **os.environ, "TMPDIR": str(temporary), "KILLS_RUN": tag, "KILLS_PHASE": case.when,
        "KILLS_WHO": who, "KILLS_MARK": str(place / "mark"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = time.monotonic()
    with (place / "stdout").open("w") as out, (place / "stderr").open("w") as err:
        process = subprocess.Popen(
            [*AS_IN_A_TERMINAL, *command_of(case, place)], stdout=out, stderr=err,
            stdin=subprocess.DEVNULL, env=environment, start_new_session=True, cwd=place,
        )  # fmt: skip
    problems = []
    struck = await_moment(case, process, place)
    said = (place / "stdout").read_text()
    struck = struck and strike(case, process, place)
    try:
        code: int | None = process.wait(timeout=limit_of(case))
    except subprocess.TimeoutExpired:
        problems.append(f"did not end within {limit_of(case)} s")
        code = None
    seconds = time.monotonic() - started
    if not until(lambda: not living(tag), GRACE_S + (case.subject == "torchrun") * 2 * TIMEOUT_S):
        problems.append(f"orphans: {[command(pid) for pid in living(tag)]}")
        for pid in living(tag):
            os.kill(pid, signal.SIGKILL)
    if not until(lambda: not left_in(temporary, case), 2):
        problems.append(f"left in TMPDIR: {left_in(temporary, case)}")
    process.wait()
    text, errors = (place / "stdout").read_text(), (place / "stderr").read_text()
    lines = [line for line in text.splitlines() if line.startswith("sumgrad:")]
    seen = Seen(
        case=case, struck=struck, said=said, exit_code=code,
        last_line=lines[-1].split(" in /")[0] if lines else "", seconds=round(seconds, 1),
        problems=tuple(problems),
    )  # fmt: skip
    return replace(seen, problems=(*problems, *wrong(seen, text, errors)))


def await_moment(case: Case, process: subprocess.Popen, place: Path) -> bool:
    """Wait for the place in the run where the signal is to strike; False if it never came."""

    def server() -> int | None:
        return server_of(process.pid)

    ready: dict[str, Callable[[], object]] = {
        "import": lambda: handles(process.pid) and (case.who != "server" or handles(server())),
        "start": lambda: len(ranks_of(server())) >= 2,
        "judging": (place / "out" / "outcomes.json").exists,
    }
    there = ready.get(case.when, (place / "mark").exists)
    while not there():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    if case.when == "import":
        time.sleep(case.delay * 1.5)
    elif case.when == "start":
        time.sleep(case.delay * (3.0 if case.subject == "faults" else 0.15))
    return True


def strike(case: Case, process: subprocess.Popen, place: Path) -> bool:
    """Send the signal; False if nobody was there any more."""
    server = server_of(process.pid)
    if case.who in ("main", "group"):
        pid: int | None = process.pid
    elif case.who == "server":
        pid = server
    elif case.when in PLACES:
        pid = int((place / "mark").read_text())
    else:
        ranks = ranks_of(server)
        pid = ranks[case.rank % len(ranks)] if ranks else None
    if not pid or state_of(pid) in ("", "Z", "X"):
        return False
    send: Callable[[int, int], None] = os.killpg if case.who == "group" else os.kill
    try:
        if case.signal not in ("stop", "stay"):
            send(pid, getattr(signal, f"SIG{case.signal}"))
            return True
        send(pid, signal.SIGSTOP)
        if case.signal == "stop" or case.who in ("main", "group"):
            time.sleep(0.5 if case.signal == "stop" else 2.0)
            send(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wrong(seen: Seen, text: str, errors: str) -> list[str]:
    """What a run said that it must not have said."""
    case, out = seen.case, []
    passed = seen.exit_code == 0 or "sumgrad: PASS" in text
    harmed = seen.struck and case.signal not in HARMLESS.get(case.who, ())
    if case.who == "server" and (case.when in ("import", "judging") or case.subject == "faults"):
        harmed = False
    if (case.subject, case.when, case.signal) == ("torchrun", "exit", "TERM"):
        harmed = False
    printed_before = "sumgrad: PASS" in seen.said
    if case.who in ("main", "group") and (printed_before or case.subject == "torchrun"):
        harmed = False
    if passed and harmed:
        out.append(f"passed: exit {seen.exit_code}, {seen.last_line}")
    if "sumgrad: FAIL" in text and not re.search(r"FAIL: .*\bcrashed", text):
        out.append("failed, and nothing was wrong with it")
    torchs = case.subject == "torchrun"
    in_ours = re.compile(r'File "[^"]*/harness/')
    ours = [part for part in tracebacks(errors) if not torchs or in_ours.search(part)]
    if ours:
        out.append(f"traceback: {ours[0][-400:]}")
    allowed: tuple[int, ...] = (0, 3, 4)
    if case.who in ("main", "group"):
        number = 9 if case.signal in ("stop", "stay") else getattr(signal, f"SIG{case.signal}")
        allowed = (*allowed, 128 + number, -number)
    if case.subject in ("torchrun", "faults"):
        allowed = (*allowed, 1)
    if seen.exit_code is not None and seen.exit_code not in allowed:
        out.append(f"exit code {seen.exit_code}: {errors[-300:]}")
    return out


def tracebacks(errors: str) -> list[str]:
    parts = errors.split("Traceback (most recent call last)")
    return parts[1:]


def limit_of(case: Case) -> float:
    return 180.0 if case.signal == "stay" or case.subject != "three_pool" else 90.0


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def living(tag: str) -> list[int]:
    """Processes that were started with this run's environment and are not dead."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"KILLS_RUN={tag}".encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def left_in(temporary: Path, case: Case) -> list[str]:
    names = [n for n in sorted(os.listdir(temporary)) if not n.startswith("torchinductor_")]
    return [n for n in names if case.subject != "torchrun" or n.startswith("sumgrad")]


def server_of(main: int) -> int | None:
    """The fork server of a command."""
    return next((pid for pid in children_of(main) if "fork_server" in command(pid)), None)


def ranks_of(server: int | None) -> list[int]:
    """The ranks and references that a fork server has started; forked, so its own name."""
    pids = children_of(server) if server else []
    return [pid for pid in pids if "fork_server" in command(pid)]


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:120]
    except OSError:
        return ""


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def handles(pid: int | None) -> bool:
    """Whether a process answers SIGTERM itself: the interpreter has come up, and our code runs."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def row_of(case: Case) -> dict:
    """One case in a directory of its own, as data."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        seen = run_case(case, Path(place))
    row = {**asdict(case), **asdict(seen)}
    del row["case"], row["said"]
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description="Drawn kills and signals; see the docstring.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started, rows = time.monotonic(), []
    cases = [c for c in draw(args.seed, args.count) if not args.only or c.number in args.only]
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(row_of, cases):
            rows.append(row)
            print(json.dumps(row), flush=True)
    bad = [row["number"] for row in rows if row["problems"]]
    summary = {
        "cases": len(rows),
        "struck": sum(row["struck"] for row in rows),
        "with_problems": bad,
        "ends": dict(Counter(row["last_line"] or f"exit {row['exit_code']}" for row in rows)),
        "by_whom": dict(Counter(row["who"] for row in rows)),
        "minutes": round((time.monotonic() - started) / 60, 1),
    }
    print(json.dumps(summary))
    if args.out:
        from sumgrad.launch.versions import versions

        machine = {"cores": os.cpu_count(), "processor": platform.machine(), **versions()}
        data = {"command": " ".join(sys.argv), "machine": machine, **summary, "rows": rows}
        args.out.write_text(json.dumps(data, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
