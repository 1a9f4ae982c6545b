"""The fork server: imports torch once, then starts ranks in a fraction of a second.

What it is: a small process between the command and the ranks. It never runs a tensor operation, a
backward or CUDA, and stays single-threaded (a child forked after an OpenMP region hangs). What it
does: fork ranks on request, reap them, enforce the deadline, keep what they print, and leave
nobody and nothing behind: whatever a rank started is adopted and ended with its job. It ends when
its parent does, the ranks die with it, and it takes their temporary files along.

    {"sync": n}          -> {"synced": n, "threads": ...}       ends a job that runs
    {"preload": [...]}   imports modules, once for all later ranks
    {"id": n, job ...}   -> {"id": n, "rank": ...} ..., {"id": n, "done": true}

One job at a time; anything that arrives while it runs ends it. See launch.py for the other side.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sumgrad.base.interpreter import HASH_SEED, shared_hash_seed
from sumgrad.base.limits import allow_open_files
from sumgrad.launch.guard import HELPERS, RankEnv, enter_rank, flush, own_exit_functions
from sumgrad.launch.local.conversation import Conversation
from sumgrad.launch.local.processes import (
    adopt_orphans,
    die_with_parent,
    end_children,
    kill,
    kill_group,
    state_of,
)
from sumgrad.launch.local.rank_log import RankLog
from sumgrad.launch.local.standstill import Standstill
from sumgrad.record.endings import rank_file

STOP_GRACE_S, KILL_GRACE_S = 3.0, 5.0
IMPORTED_UNDER = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TRITON_INTERPRET",
)  # fmt: skip
TICK_S, SOON_S = 0.05, 0.002  # between two looks at the ranks; when one has closed its output
BEAT_S = 1.0
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@dataclass(slots=True)
class _Rank:
    rank: int
    pid: int
    started: float
    log: RankLog
    helper: bool = False
    exit_code: int | None = None
    killed: bool = False  # by this server
    stopped: bool = False  # when it was killed, by a signal or a debugger


@dataclass(slots=True)
class _Job:
    request: dict[str, Any]
    ranks: list[_Rank]
    deadline: float
    standstill: Standstill
    stop_at: float | None = None
    kill_at: float | None = None
    beat_at: float = 0.0
    soon_until: float = 0.0  # a process that closes its output is about to end

    @property
    def living(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    @property
    def living_ranks(self) -> list[_Rank]:
        return [rank for rank in self.living if not rank.helper]


def serve(ours: Conversation, *, preload: list[str], scratch: Path) -> None:
    """Answer requests until the other end closes. scratch: removed by whoever is last."""
    for name in preload:
        importlib.import_module(name)
    if "torch" in sys.modules:
        sys.modules["torch"].empty(1)  # it reads how to allocate when it first does
    _leave_alone()
    scratch.mkdir(mode=0o700, exist_ok=True)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    message = None
    while True:
        message = message or ours.receive(None)
        assert message is not None
        if "sync" in message:
            ours.send({"synced": message["sync"], "threads": threads})
            message = None
        elif "preload" in message:
            _preload(message["preload"], message["sys_path"])
            message = None
        else:
            message = _run(ours, message)


def _preload(modules: list[str], sys_path: list[str]) -> None:
    """Import what the ranks will; one that cannot be imported here says so in the rank."""
    ours, sys.path[:] = sys.path[:], sys_path
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for name in modules:
            with contextlib.suppress(Exception, SystemExit):
                importlib.import_module(name)
    sys.path[:] = ours
    _leave_alone()


def _leave_alone() -> None:
    """What was imported lives as long as the ranks: their garbage collectors need not look at it,
    a quarter of a second each time."""
    gc.collect()
    gc.freeze()


def _run(ours: Conversation, request: dict[str, Any]) -> dict[str, Any] | None:
    """Run a job to its end. Returns the message that ended it before, if one did."""
    rendezvous = Path(request["rendezvous"]).parent
    rendezvous.mkdir(parents=True)
    job = _Job(
        request, [], deadline=time.monotonic() + request["timeout_s"] * request["runs"],
        standstill=Standstill(partial(_place, request)),
    )  # fmt: skip
    try:
        _start(ours, job)
        while job.living:
            if (message := _listen(ours, job)) is not None:
                return message
            _reap(ours, job)
            _enforce(job)
    finally:
        for rank in job.living:
            _end(rank)
        end_children()
        for rank in job.ranks:
            rank.log.close()
        shutil.rmtree(rendezvous, ignore_errors=True)
    ours.send({"id": request["id"], "done": True})
    return None


def _start(ours: Conversation, job: _Job) -> None:
    request = job.request
    start = _spawn if request["start"] == "spawn" else _fork
    for number in range(request["num_ranks"] + len(request["helpers"])):
        log = RankLog(_log(request, number))
        readers = [rank.log.reader for rank in job.ranks]
        pid = start(request, number, log.writer, [ours.fileno(), log.reader, *readers])
        os.close(log.writer)
        helper = number >= request["num_ranks"]
        job.ranks.append(_Rank(number, pid, time.monotonic(), log, helper))


def _listen(ours: Conversation, job: _Job) -> dict[str, Any] | None:
    """Wait a moment for output, an end or a message, and take what there is."""
    now = time.monotonic()
    if now > job.beat_at + BEAT_S:
        job.beat_at = now
        ours.mention({"id": job.request["id"], "beat": True})
    logs = {rank.log.reader: rank.log for rank in job.ranks if rank.log.open}
    poll = select.poll()
    for descriptor in (ours.fileno(), *logs):
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll((SOON_S if now < job.soon_until else TICK_S) * 1000):
        if descriptor in logs:
            logs[descriptor].drain()
            if not logs[descriptor].open:
                job.soon_until = time.monotonic() + TICK_S
    return ours.receive(0)  # it may have come together with the request


def _reap(ours: Conversation, job: _Job) -> None:
    """Collect every rank that has ended."""
    for rank in job.living:
        pid, status = os.waitpid(rank.pid, os.WNOHANG)
        if pid:
            rank.exit_code = os.waitstatus_to_exitcode(status)
            seconds = round(time.monotonic() - rank.started, 3)
            event = {"rank": rank.rank, "exit_code": rank.exit_code, "seconds": seconds}
            how = {"killed": rank.killed, "stopped": rank.stopped}
            ours.send({"id": job.request["id"], **event, **how})


def _end(rank: _Rank) -> None:
    """Kill a rank, with its group, that will not end of itself."""
    rank.killed = True
    rank.stopped = rank.stopped or state_of(rank.pid) in ("T", "t")
    kill_group(rank.pid, signal.SIGKILL)
    kill(rank.pid, signal.SIGKILL)


def _enforce(job: _Job) -> None:
    """First death, a standstill or the deadline: have the others write where they are, then kill.

    Helpers join no collective, so a rank's death does not end them; a deadline of their own does.
    """
    now = time.monotonic()
    directory = Path(job.request["directory"])
    patience = job.request["helper_patience"]
    if now > job.deadline + patience * job.request["timeout_s"] + KILL_GRACE_S:
        for rank in job.living:
            _end(rank)
    if job.stop_at is None:
        died = any(
            not r.helper
            and r.exit_code is not None
            and (r.exit_code != 0 or not rank_file(directory, r.rank, ".json").exists())
            for r in job.ranks
        )
        if died or now > job.deadline:
            job.stop_at = now + STOP_GRACE_S
        elif job.standstill.is_final([r for r in job.ranks if not r.helper], now):
            job.stop_at = now
    if job.stop_at is not None and job.kill_at is None and now > job.stop_at:
        job.kill_at = now + KILL_GRACE_S
        for rank in job.living_ranks:
            kill(rank.pid, signal.SIGUSR1)
    if job.kill_at is not None and now > job.kill_at:
        for rank in job.living_ranks:
            _end(rank)


def _fork(request: dict[str, Any], rank: int, output: int, foreign: list[int]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE_SIGNALS)  # the server's handlers are not ours
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE_SIGNALS)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE_SIGNALS)
        die_with_parent()
        _redirect(output)
        for descriptor in (output, *foreign):
            os.close(descriptor)
        with own_exit_functions():
            code = _enter(request, rank)
    except BaseException:
        traceback.print_exc()
        code = code or 1
    finally:
        flush()
        os._exit(code)


def _spawn(request: dict[str, Any], rank: int, output: int, foreign: list[int]) -> int:
    """Where forking is unsafe (macOS), or too much alike: a fresh interpreter for every rank, with
    a hash of strings of its own, the same one each time, unless it is set for all."""
    del foreign  # none of them is inherited
    file = Path(request["rendezvous"]).with_name("request.json")
    if not file.exists():
        file.write_text(json.dumps(request))
    command = [sys.executable, "-m", __spec__.name, "--rank", str(rank), str(file)]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    salt = {HASH_SEED: shared_hash_seed(request["environ"]) or str(rank + 1)}
    return os.posix_spawn(
        sys.executable, command, {**os.environ, **salt}, file_actions=actions, setpgroup=0
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


def _redirect(output: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _leave(code: int, scratch: Path, parent: int) -> NoReturn:
    """End everybody below and go; also from within a signal handler.

    The temporary files are the command's while it lives: it may start another server over them.
    """
    end_children()
    if os.getppid() != parent:
        shutil.rmtree(scratch, ignore_errors=True)
    os._exit(code)


def _closed(scratch: Path, parent: int) -> NoReturn:
    """Nobody is at the other end: the command dies (its files are closed first), or has closed."""
    end_children()
    deadline = time.monotonic() + KILL_GRACE_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(SOON_S)
    _leave(0, scratch, parent)


_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def main() -> None:
    """`--serve FD PARENT SCRATCH MODULE...` is the server; `--rank N FILE` one spawned rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "--rank":
        die_with_parent()
        sys.exit(_enter(json.loads(Path(sys.argv[3]).read_text()), int(sys.argv[2])))
    parent, scratch = int(sys.argv[3]), Path(sys.argv[4])
    for number in LEAVE_SIGNALS:
        signal.signal(number, lambda number, _: _leave(128 + number, scratch, parent))
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    allow_open_files()
    ours = Conversation(socket.socket(fileno=int(sys.argv[2])))
    try:
        serve(ours, preload=sys.argv[5:], scratch=scratch)
    except EOFError:
        _closed(scratch, parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            sys.stderr.write(
                f"sumgrad: a rank could not be started: {error.strerror} (see the free memory, and "
                f"ulimit -u for processes, ulimit -n for open files)\n"
            )
        else:
            traceback.print_exc()
        _leave(1, scratch, parent)


if __name__ == "__main__":
    main()
