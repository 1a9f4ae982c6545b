"""What becomes of a check over several hosts, on a good day and on bad ones: a table.

    python scripts/several_hosts.py --out docs/data/several_hosts.json [--only NAME]

The hosts are made here (scripts/hosts.py): a network, a process table and a disk of its own each;
torchrun's agents find each other as on a cluster. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hosts import PORT, Hosts, why_not

DEADLINE_S = 60  # of the check; connecting and importing are part of it
LATEST_S = 200.0  # by which every host must have ended, whatever happened

PROGRAM = """
import os, time, signal
import torch, torch.distributed as dist
from torch import nn

MODE, HOST = os.environ.get("MODE", ""), os.uname().nodename

class Mine:
    def build(self):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    def batch(self):
        g = torch.Generator().manual_seed(1)
        return {"x": torch.randn(21, 5, generator=g), "y": torch.randn(21, 3, generator=g)}
    def loss_sum(self, model, rows):
        return (model(rows["x"]) - rows["y"]).square().sum(), len(rows["x"]) * 3
    def distribute(self, model, ctx):
        if MODE == "fsdp2":
            from torch.distributed.fsdp import fully_shard
            fully_shard(model, mesh=ctx.mesh)
            model.set_force_sum_reduction_for_comms(True)
            model.set_gradient_divide_factor(1.0)
        return model
    def step(self, model, batch, ctx):
        mine = {k: v.tensor_split(ctx.world_size)[ctx.rank] for k, v in batch.items()}
        loss, _ = self.loss_sum(model, mine)
        (loss / 63).backward()
        last = ctx.rank == ctx.world_size - 1
        if MODE == "raise" and last:
            raise RuntimeError("a bad row")
        if MODE in ("kill", "stop") and last:
            os.kill(os.getpid(), signal.SIGKILL if MODE == "kill" else signal.SIGSTOP)
        if MODE == "sleep" or (MODE == "late" and last):
            print("in the step", flush=True)
            time.sleep(6 if MODE == "sleep" else 600)
        if MODE == "fsdp2":
            return
        for i, p in enumerate(model.parameters()):
            if MODE == "skip" and last and i == 3:
                continue
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG if MODE == "avg" else dist.ReduceOp.SUM)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """ranks: of each host. mode: of the Program. act: what happens while the step runs.

    ends: exit codes that its hosts may end with, None for one that was switched off.
    """

    name: str
    ends: tuple[set[int] | None, ...]
    ranks: tuple[int, ...] = (2, 1)
    mode: str = ""
    act: Callable[[Hosts], object] | None = None
    prepare: Callable[[Hosts], object] | None = None
    says: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Of each host its exit code and seconds to its end, None where it did not end by itself; what
    was left running; what it said."""

    name: str
    ranks: tuple[int, ...]
    exits: tuple[int | None, ...]
    seconds: tuple[float | None, ...]
    left: int
    said: tuple[str, ...]
    as_wanted: bool


def _narrow(hosts: Hosts) -> None:
    for host in range(hosts.number):
        hosts.narrow(host, "1mbit")


def _cut_for(seconds: float) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        hosts.cut(1)
        time.sleep(seconds)
        hosts.mend(1)

    return act


def _kill_agent(host: int) -> Callable[[Hosts], None]:
    def act(hosts: Hosts) -> None:
        for pid in hosts.processes(host):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"torch.distributed.run" in words:
                os.kill(pid, signal.SIGKILL)

    return act


PASS, BAD, UNKNOWN = {0}, {1}, {1, 3}  # torchrun makes 1 of whatever a rank ended with
CASES = (
    Case(name="a right step", ends=(PASS, PASS), says="PASS"),
    Case(name="three hosts, 3 + 2 + 1 ranks", ranks=(3, 2, 1), ends=(PASS,) * 3, says="PASS"),
    Case(name="FSDP2 over both hosts", mode="fsdp2", ranks=(2, 2), ends=(PASS, PASS), says="PASS"),
    Case(name="1 Mbit/s, what is more is lost", prepare=_narrow, ends=(PASS, PASS), says="PASS"),
    Case(name="the cable out for 4 s", mode="sleep", act=_cut_for(4), ends=(PASS, PASS),
         says="PASS"),
    Case(name="averages instead of a sum", mode="avg", ends=(BAD, BAD), says="FAIL"),
    Case(name="one collective less on the other host", mode="skip", ends=(BAD, BAD),
         says="ranks disagree"),
    Case(name="a rank of the other host raises", mode="raise", ends=(UNKNOWN, UNKNOWN),
         says="a bad row"),
    Case(name="a rank of the other host is killed", mode="kill", ends=(UNKNOWN, UNKNOWN),
         says="UNKNOWN"),
    Case(name="a rank of the other host is stopped (SIGSTOP)", mode="stop",
         ends=(UNKNOWN, UNKNOWN), says="UNKNOWN"),
    Case(name="a rank of the other host never comes", mode="late", ends=(UNKNOWN, UNKNOWN),
         says="UNKNOWN"),
    Case(name="the other host loses its power", mode="sleep", act=lambda h: h.power_off(1),
         ends=(UNKNOWN, None), says="UNKNOWN"),
    Case(name="rank 0's host loses its power", mode="sleep", act=lambda h: h.power_off(0),
         ends=(None, {*UNKNOWN, 137}), says="UNKNOWN"),  # its agent may have to be killed
    Case(name="the other host's cable is out", mode="sleep", act=lambda h: h.cut(1),
         ends=(UNKNOWN, {*UNKNOWN, 137}), says="UNKNOWN"),
    Case(name="the other host's agent is killed", mode="sleep", act=_kill_agent(1),
         ends=(UNKNOWN, {137}), says="UNKNOWN"),
    Case(name="rank 0's agent is killed", mode="sleep", act=_kill_agent(0),
         ends=({137}, UNKNOWN), says="UNKNOWN"),
)  # fmt: skip


def run_case(case: Case, place: Path) -> Row:
    """One check over hosts of its own."""
    topology = write_program(place, sum(case.ranks))
    with Hosts(len(case.ranks), place) as hosts:
        if case.prepare:
            case.prepare(hosts)
        started = time.monotonic()
        processes = [
            hosts.start(i, command_of(hosts, i, case.ranks, topology), MODE=case.mode)
            for i in range(len(case.ranks))
        ]
        watched = [Watched(process, started) for process in processes]
        if case.act:
            while not any("in the step" in line for w in watched for line in w.lines):
                time.sleep(0.1)
                if time.monotonic() - started > LATEST_S:
                    break
            case.act(hosts)
        for one in watched:
            one.thread.join(max(0.0, LATEST_S - (time.monotonic() - started)))
        time.sleep(1)
        left = sum(len(hosts.processes(i)) for i, end in enumerate(case.ends) if end is not None)
        exits = tuple(
            None if end is None else process.poll()
            for process, end in zip(processes, case.ends, strict=True)
        )
    said = tuple(_short("".join(w.lines)) for w in watched)
    fine = all(end is None or code in end for code, end in zip(exits, case.ends, strict=True))
    heard = any(case.says in "".join(w.lines) for w in watched)
    return Row(
        name=case.name,
        ranks=case.ranks,
        exits=exits,
        seconds=tuple(
            None if end is None or w.ended is None else round(w.ended, 1)
            for w, end in zip(watched, case.ends, strict=True)
        ),
        left=left,
        said=said,
        as_wanted=fine and heard and not left,
    )


def write_program(place: Path, ranks: int) -> Path:
    """The Program and its topology, whose path is returned."""
    program, topology = place / "program.py", place / "dp.yaml"
    program.write_text(PROGRAM)
    topology.write_text(
        f"name: dp\nworkload: {program}:Mine\npools:\n  train: {{axes: {{dp: {ranks}}}}}\n"
    )
    return topology


class Watched:
    """Reads what a process says until it ends."""

    def __init__(self, process: subprocess.Popen[str], started: float) -> None:
        self.lines: list[str] = []
        self.ended: float | None = None
        self._process, self._started = process, started
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
        self._process.wait()
        self.ended = time.monotonic() - self._started


def command_of(hosts: Hosts, host: int, ranks: tuple[int, ...], topology: Path) -> list[str]:
    """torchrun on one of the hosts. ranks: of each."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(ranks)),
        "--nproc-per-node", str(ranks[host]), "--rdzv-backend", "c10d", "--rdzv-id", "sg",
        "--rdzv-endpoint", f"{hosts.address(0)}:{PORT}", "--local-addr", hosts.address(host),
        "-m", "sumgrad.run", "--topology", str(topology), "--timeout", str(DEADLINE_S),
    ]  # fmt: skip


def _short(text: str) -> str:
    """The lines of ours that say how it ended."""
    lines = [re.sub(r" in /\S+", "", line) for line in text.splitlines()]
    told = [
        line for line in lines if re.match(r"sumgrad: (PASS|FAIL|UNKNOWN)|\s*(rank \d+ \()", line)
    ]
    told += [line for line in lines if "RuntimeError: a bad row" in line][:1]
    return "\n".join(dict.fromkeys(told))


def table(rows: list[dict[str, Any]]) -> str:
    """As it stands in docs/clusters.md."""
    lines = ["| what happens | ranks | verdict | exit codes | seconds to the end |",
             "|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        seconds = ", ".join("-" if s is None else f"{s:.0f}" for s in row["seconds"])
        exits = ", ".join("-" if code is None else str(code) for code in row["exits"])
        found = re.findall(r"sumgrad: (PASS|FAIL|UNKNOWN)", "\n".join(row["said"]))
        ranks = " + ".join(map(str, row["ranks"]))
        verdict = found[0] if found else "none"
        lines.append(f"| {row['name']} | {ranks} | {verdict} | {exits} | {seconds} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="a case whose name has this")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"several_hosts: {reason}")
    rows = []
    for case in CASES:
        if args.only and not any(word in case.name for word in args.only):
            continue
        with tempfile.TemporaryDirectory() as place:
            rows.append(run_case(case, Path(place)))
        row = rows[-1]
        print(f"{'ok ' if row.as_wanted else 'NOT'} {row.name}: exits {row.exits}, "
              f"seconds {row.seconds}, {row.left} left; {row.said}", flush=True)  # fmt: skip
    if args.out:
        told = [asdict(row) for row in rows]
        args.out.write_text(json.dumps({"rows": told}, indent=1) + "\n")
        print(table(told))
    sys.exit(not all(row.as_wanted for row in rows))


if __name__ == "__main__":
    main()
