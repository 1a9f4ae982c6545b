"""Drawn kills over several hosts: a host, an agent or a rank, when and how, in whole checks.

    python scripts/kills_hosts.py --count 24 --seed 0 --out docs/data/kills_hosts.json

The hosts are made here (scripts/hosts.py). What every case must show, on each host that stands:

- No PASS that is not earned: said after somebody was struck while ranks still computed. Earned is
  it where rank 0 had said it before, or where what was struck had nothing to do any more.
- No FAIL: nothing is wrong with what is run. No traceback that names our files.
- It ends by itself within the time that the check allows, and nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hosts import Hosts, why_not
from several_hosts import LATEST_S, Watched, command_of, write_program

LAYOUTS = ((2, 1), (1, 2), (2, 1, 1))
VICTIMS = ("host", "cable", "agent", "rank")
SIGNALS = ("KILL", "TERM", "INT", "SEGV", "STOP")
MODES = ("", "sleep")  # the step as it is; one that waits for six seconds in its middle
OUR_FILES = re.compile(r'File "[^"]*/(?:sumgrad|harness)/(?!run\.py)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """victim: on which host; signal: of an agent or rank. after: seconds since every host had its
    ranks (until then torchrun's rendezvous is alone); of a step that waits, since it said so."""

    number: int
    ranks: tuple[int, ...]
    mode: str
    victim: str
    host: int
    signal: str
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What became of it: of each host its exit code and seconds, None where it was switched off."""

    case: Case
    struck: bool
    exits: tuple[int | None, ...]
    seconds: tuple[float | None, ...]
    verdict: str
    problems: tuple[str, ...]


def draw(seed: int, count: int) -> list[Case]:
    """The same cases for the same seed."""
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        ranks, mode = rng.choice(LAYOUTS), rng.choice(MODES)
        cases.append(
            Case(
                number=number, ranks=ranks, mode=mode, victim=rng.choice(VICTIMS),
                host=rng.randrange(len(ranks)), signal=rng.choice(SIGNALS),
                after=round(rng.uniform(0, 5 if mode else 15), 2),
            )
        )  # fmt: skip
    return cases


def run_case(case: Case, place: Path) -> Seen:
    """One check over hosts of its own."""
    topology = write_program(place, sum(case.ranks))
    with Hosts(len(case.ranks), place) as hosts:
        started = time.monotonic()
        watched = [
            Watched(
                hosts.start(i, command_of(hosts, i, case.ranks, topology), MODE=case.mode), started
            )
            for i in range(len(case.ranks))
        ]
        _wait(case, hosts, watched, started)
        before = _text(watched)
        struck = _strike(case, hosts)
        gone = {case.host} if struck and case.victim == "host" else set()
        for i, one in enumerate(watched):
            if i not in gone:
                one.thread.join(max(0.0, LATEST_S - (time.monotonic() - started)))
        time.sleep(1)
        left = {i: len(hosts.processes(i)) for i in range(len(case.ranks)) if i not in gone}
        codes = [None if i in gone else one.code() for i, one in enumerate(watched)]
        seconds = tuple(
            None if i in gone or one.ended is None else round(one.ended, 1)
            for i, one in enumerate(watched)
        )
    after = _text(watched)
    problems = [f"{n} processes left on host {i}" for i, n in left.items() if n]
    problems += [
        f"host {i} did not end" for i, s in enumerate(seconds) if s is None and i not in gone
    ]
    problems += _wrong(case, before, after, struck=struck)
    return Seen(
        case=case, struck=struck, exits=tuple(codes), seconds=seconds,
        verdict=_verdict(after), problems=tuple(problems),
    )  # fmt: skip


def _wait(case: Case, hosts: Hosts, watched: list[Watched], started: float) -> None:
    """Until the moment that was drawn."""

    def begun() -> bool:
        if case.mode:
            return any("in the step" in line for w in watched for line in w.lines)
        return all(_ranks_of(hosts, i) for i in range(hosts.number))

    while not begun():
        if time.monotonic() - started > LATEST_S or all(w.ended is not None for w in watched):
            return
        time.sleep(0.1)
    since = time.monotonic()
    while time.monotonic() - since < case.after and any(w.ended is None for w in watched):
        time.sleep(0.05)


def _strike(case: Case, hosts: Hosts) -> bool:
    """Whether there was somebody to strike."""
    there = hosts.processes(case.host)
    acts: dict[str, Callable[[int], object]] = {"host": hosts.power_off, "cable": hosts.cut}
    if case.victim in acts:
        acts[case.victim](case.host)
        return bool(there)
    agents = [pid for pid in there if _runs(pid, b"torch.distributed.run", agent=True)]
    pids = agents if case.victim == "agent" else _ranks_of(hosts, case.host)
    if not pids:
        return False
    pid = pids[case.number % len(pids)]
    try:
        os.kill(pid, getattr(signal, f"SIG{case.signal}"))
        if case.victim == "agent" and case.signal == "STOP":
            time.sleep(2)  # nobody would end it
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _ranks_of(hosts: Hosts, host: int) -> list[int]:
    return [p for p in hosts.processes(host) if _runs(p, b"sumgrad.run", agent=False)]


def _runs(pid: int, wanted: bytes, *, agent: bool) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return wanted in words and (b"torch.distributed.run" in words) == agent


def _text(watched: list[Watched]) -> str:
    return "".join(line for one in watched for line in one.lines)


def _verdict(text: str) -> str:
    found = re.findall(r"sumgrad: (PASS|FAIL|UNKNOWN)", text)
    return found[0] if found else "none"


def _wrong(case: Case, before: str, after: str, *, struck: bool) -> list[str]:
    out = []
    harmed = struck and case.victim in ("host", "agent", "rank") and case.signal != "INT"
    computing = case.mode and "in the step" in before and case.after < 5
    if harmed and computing and _verdict(before) != "PASS" and _verdict(after) == "PASS":
        out.append("passed though somebody was struck in the step")
    if _verdict(after) == "FAIL":
        out.append("failed, and nothing was wrong with it")
    traces = after.split("Traceback (most recent call last)")[1:]
    out += [f"a traceback of ours: {t[:2000]}" for t in traces if OUR_FILES.search(t)][:1]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="so many of them, from the first on")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"kills_hosts: {reason}")
    found = []
    for case in draw(args.seed, args.count)[args.skip :]:
        with tempfile.TemporaryDirectory() as place:
            found.append(run_case(case, Path(place)))
        one = found[-1]
        c = one.case
        print(f"{'ok ' if not one.problems else 'NOT'} {c.number} {c.ranks} {c.mode or 'plain'} "
              f"{c.victim} {c.host} {c.signal} at {c.after}: {one.verdict}, exits {one.exits}, "
              f"seconds {one.seconds} {one.problems}", flush=True)  # fmt: skip
    struck = [one for one in found if one.struck]
    head = {
        "seed": args.seed, "cases": len(found), "struck": len(struck),
        "victims": dict(Counter(one.case.victim for one in struck)),
        "verdicts": dict(Counter(one.verdict for one in struck)),
        "problems": sum(bool(one.problems) for one in found),
        "slowest_s": max((s for one in found for s in one.seconds if s is not None), default=0),
    }  # fmt: skip
    print(json.dumps(head))
    if args.out:
        args.out.write_text(
            json.dumps({**head, "rows": [asdict(o) for o in found]}, indent=1) + "\n"
        )
    sys.exit(bool(head["problems"]))


if __name__ == "__main__":
    main()
