"""The fork server: imports torch once, then starts ranks in a fraction of a second.

What it is: a small process between the command and the ranks. It never runs a tensor operation, a
backward or CUDA, and stays single-threaded (a child forked after an OpenMP region hangs). What it
does: fork ranks on request, reap them, enforce the deadline, and leave nobody behind: it dies with
its parent, and the ranks die with it. Speaks JSON lines over one socket; see launch.py.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sumgrad.endings import open_operation, read_ledger
from sumgrad.operations import disagreement_of
from sumgrad.rank import HELPERS, RankEnv, enter_rank, rank_file

STOP_GRACE_S, KILL_GRACE_S = 3.0, 5.0
STANDSTILL_S = 10.0
IMPORTED_UNDER = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET",
)  # fmt: skip
DISAGREEMENT_S = 1.0  # between two looks at the ledgers of ranks that stand still


@dataclass(slots=True)
class _Rank:
    rank: int
    pid: int
    started: float
    helper: bool = False
    exit_code: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class _Job:
    request: dict[str, Any]
    ranks: list[_Rank]
    deadline: float
    stop_at: float | None = None
    kill_at: float | None = None
    window_at: float = 0.0
    written: int = 0
    looked_at: float = 0.0
    seen: int = 0

    @property
    def living(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    @property
    def living_ranks(self) -> list[_Rank]:
        return [rank for rank in self.living if not rank.helper]


def serve(connection: socket.socket, *, preload: list[str]) -> None:
    """Answer requests until the other end closes."""
    started = time.monotonic()
    for name in preload:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    _send(
        connection,
        {"ready": os.getpid(), "threads": threads, "seconds": round(time.monotonic() - started, 3)},
    )
    for line in connection.makefile("r"):
        request = json.loads(line)
        _run(connection, request)


def _run(connection: socket.socket, request: dict[str, Any]) -> None:
    started = time.monotonic()
    ranks = []
    start = _spawn if request["start"] == "spawn" else _fork
    for number in range(request["num_ranks"] + len(request["helpers"])):
        pid = start(connection, request, number)
        helper = number >= request["num_ranks"]
        ranks.append(_Rank(number, pid, time.monotonic(), helper))
    job = _Job(request, ranks, deadline=started + request["timeout_s"])
    try:
        while job.living:
            if _closed(connection):
                raise SystemExit(0)
            _reap(connection, job)
            _enforce(job)
    finally:
        for rank in job.living:
            _kill(rank.pid, signal.SIGKILL)
    _send(connection, {"done": True})


def _reap(connection: socket.socket, job: _Job) -> None:
    """Wait up to 50 ms for news, then collect every rank that has ended."""
    signal.sigtimedwait([signal.SIGCHLD], 0.05) if hasattr(signal, "sigtimedwait") else time.sleep(
        0.02
    )
    for rank in job.living:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            rank.exit_code = os.waitstatus_to_exitcode(status)
            rank.seconds = round(time.monotonic() - rank.started, 3)
            event = {"rank": rank.rank, "exit_code": rank.exit_code, "seconds": rank.seconds}
            _send(connection, event)


def _enforce(job: _Job) -> None:
    """First death, a standstill or the deadline: have the others write where they are, then kill.

    Helpers join no collective, so a rank's death does not end them; a deadline of their own does.
    """
    now = time.monotonic()
    directory = Path(job.request["directory"])
    patience = job.request["helper_patience"]
    if now > job.deadline + patience * job.request["timeout_s"] + KILL_GRACE_S:
        for rank in job.living:
            _kill(rank.pid, signal.SIGKILL)
    if job.stop_at is None:
        died = any(
            not r.helper
            and r.exit_code is not None
            and (r.exit_code != 0 or not rank_file(directory, r.rank, ".json").exists())
            for r in job.ranks
        )
        if died or now > job.deadline:
            job.stop_at = now + STOP_GRACE_S
        elif _stands_still(job, now) or _disagrees(job, now):
            job.stop_at = now
    if job.stop_at is not None and job.kill_at is None and now > job.stop_at:
        job.kill_at = now + KILL_GRACE_S
        for rank in job.living_ranks:
            _kill(rank.pid, signal.SIGUSR1)
    if job.kill_at is not None and now > job.kill_at:
        for rank in job.living_ranks:
            _kill(rank.pid, signal.SIGKILL)


def _stands_still(job: _Job, now: float) -> bool:
    """Whether for a while every rank has stood in an operation, and none has issued another."""
    if now < job.window_at + STANDSTILL_S:
        return False
    ranks = job.living_ranks
    written = sum(_ledger_bytes(job, rank) for rank in ranks)
    still = job.window_at > 0 and written == job.written
    job.window_at, job.written = now, written
    return still and all(_stands_in_operation(job, rank) for rank in ranks)


def _disagrees(job: _Job, now: float) -> bool:
    """Whether nothing was written for a moment, and ranks can never meet in what they issued.

    Two members of a group issued different operations, or one ended well without issuing what
    another one stands in.
    """
    if now < job.looked_at + DISAGREEMENT_S:
        return False
    ranks = [rank for rank in job.ranks if not rank.helper]
    written = sum(_ledger_bytes(job, rank) for rank in ranks)
    quiet = job.looked_at > 0 and written == job.seen and len(ranks) > 1
    job.looked_at, job.seen = now, written
    if not quiet or not any(_stands_in_operation(job, rank) for rank in job.living_ranks):
        return False
    ledgers = {
        rank.rank: list(read_ledger(rank_file(*_place(job.request, rank.rank), ".ledger.jsonl")))
        for rank in ranks
    }
    ended = {rank.rank for rank in ranks if rank.exit_code is not None}
    return any(d.mismatch or ended & set(d.absent) for d in disagreement_of(ledgers))


def _stands_in_operation(job: _Job, rank: _Rank) -> bool:
    return open_operation(rank_file(*_place(job.request, rank.rank), ".ledger.jsonl")) is not None


def _ledger_bytes(job: _Job, rank: _Rank) -> int:
    try:
        return rank_file(*_place(job.request, rank.rank), ".ledger.jsonl").stat().st_size
    except OSError:
        return 0


def _fork(connection: socket.socket, request: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        connection.close()
        die_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        _redirect(_log(request, rank))
        code = _enter(request, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _spawn(connection: socket.socket, request: dict[str, Any], rank: int) -> int:
    """Where forking is unsafe (macOS): a fresh interpreter for every rank."""
    file = Path(request["rendezvous"]).with_name("request.json")
    if not file.exists():
        file.write_text(json.dumps(request))
    log = str(_log(request, rank))
    command = [sys.executable, "-m", "sumgrad.fork_server", "--rank", str(rank), str(file)]
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, write, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    return os.posix_spawn(
        sys.executable, command, dict(os.environ), file_actions=actions, setsigmask=[]
    )


def _enter(request: dict[str, Any], rank: int) -> int:
    import torch

    torch.set_num_threads(1)
    _set_environment(request["environ"])
    os.chdir(request["cwd"])
    sys.path[:] = request["sys_path"]
    directory, number = _place(request, rank)
    env = RankEnv(
        rank=number,
        world_size=request["num_ranks"],
        directory=directory,
        rendezvous=Path(request["rendezvous"]),
        timeout_s=request["timeout_s"]
        * (1 if rank < request["num_ranks"] else request["helper_patience"]),
    )
    work = request if rank < request["num_ranks"] else request["helpers"][number]
    return enter_rank(env, work["target"], work["arguments"])


def _set_environment(wanted: dict[str, str]) -> None:
    """The caller's environment as it is now; what this process was imported under stays."""
    kept = {name: os.environ[name] for name in IMPORTED_UNDER if name in os.environ}
    os.environ.clear()
    os.environ.update({**wanted, **kept})


def _place(request: dict[str, Any], rank: int) -> tuple[Path, int]:
    """Directory and number of a process: helpers have a record of their own, below `helpers/`."""
    directory, num_ranks = Path(request["directory"]), request["num_ranks"]
    return (directory, rank) if rank < num_ranks else (directory / HELPERS, rank - num_ranks)


def _log(request: dict[str, Any], rank: int) -> Path:
    return rank_file(*_place(request, rank), ".log")


def _redirect(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)


def _closed(connection: socket.socket) -> bool:
    ready, _, _ = select.select([connection], [], [], 0)
    return bool(ready) and not connection.recv(1, socket.MSG_PEEK)


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _send(connection: socket.socket, event: dict[str, Any]) -> None:
    try:
        connection.sendall((json.dumps(event) + "\n").encode())
    except OSError:
        raise SystemExit(0) from None


def main() -> None:
    """`--serve FD MODULE...` is the server; `--rank N FILE` is one spawned rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "--rank":
        die_with_parent()
        sys.exit(_enter(json.loads(Path(sys.argv[3]).read_text()), int(sys.argv[2])))
    die_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    connection = socket.socket(fileno=int(sys.argv[2]))
    serve(connection, preload=sys.argv[3:])


if __name__ == "__main__":
    main()
