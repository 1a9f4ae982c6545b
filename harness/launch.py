"""The local launcher: ranks on this machine, started from a warm fork server.

    with Launcher() as launcher:
        outcomes = launcher.run(RankJob(target="module:function", num_ranks=10, directory=run_dir))

One outcome for each rank, whatever happens; what the others wrote is kept; no process is left
behind, also after Ctrl-C or when this process is killed. For many machines use torchrun.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sumgrad.endings import outcome_from_record
from sumgrad.interpreter import server_environment
from sumgrad.outcome import RankOutcome
from sumgrad.rank import HELPERS

Progress = Callable[[str], None]
SINGLE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
}
READ_ON_IMPORT = (
    "ATEN", "CUDA", "GLOO", "KMP", "LD_", "MALLOC", "MKL", "NCCL", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH", "TRITON",
)  # fmt: skip
PRELOAD_TORCH = ("torch", "torch.distributed", "torch._dynamo", "safetensors.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """`target(guard, **arguments)` in one process beside the ranks, outside their group."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """`target(guard, **arguments)` on every rank. directory: exists, empty; holds `ranks/`.

    helpers: processes of no rank that run at the same time, recorded under `helpers/`.
    pools: rank -> pool name, for the outcomes. timeout_s: seconds until every rank must be done;
    helpers, which may be references of large batches, have `helper_patience` times as long.
    """

    target: str
    num_ranks: int
    directory: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pools: Sequence[str] = ()
    helpers: Sequence[Helper] = ()
    timeout_s: float = 60.0
    helper_patience: int = 10
    start: Literal["fork", "spawn"] = "fork" if sys.platform == "linux" else "spawn"


class LaunchError(RuntimeError):
    """The fork server itself could not start or died."""


class Launcher:
    """A fork server and the socket to it. Use as a context manager; `run` as often as you like."""

    def __init__(self, *, preload: Sequence[str] = ()) -> None:
        self._preload = [
            *PRELOAD_TORCH,
            "sumgrad.check_rank",
            "sumgrad.check_reference",
            "sumgrad.workloads.three_pool",
            "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel",
            "torch.distributed.pipelining",
            *preload,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._read_on_import: dict[str, str] = {}
        self.threads: int | None = None

    def __enter__(self) -> Launcher:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The fork server's process id, once started."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start the server process; it imports torch while this process goes on.

        A server that died is replaced, and so is one that imported its libraries under another
        setting of the variables that they read on import.
        """
        if self._process is not None:
            if self._process.poll() is None and self._read_on_import == _read_on_import():
                return
            self.close()
        self._read_on_import = _read_on_import()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "sumgrad.fork_server", "--serve", str(theirs.fileno())]
        self._process = subprocess.Popen(
            [*command, *self._preload],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **server_environment(), **SINGLE_THREAD},
        )
        theirs.close()
        self._socket = ours
        self._lines = ours.makefile("r")

    def wait_ready(self) -> None:
        """Wait until the server has imported everything. Raises LaunchError."""
        self.start()
        if self.threads is None:
            self.threads = int(self._event()["threads"])

    def run(self, job: RankJob, *, progress: Progress = lambda _: None) -> list[RankOutcome]:
        """Run a job to its end; exactly one outcome for each rank, then each helper, in order."""
        self.submit(job)
        return self.collect(job, progress=progress)

    def submit(self, job: RankJob) -> None:
        """Start a job's ranks; this process can go on with other work before `collect`."""
        self.wait_ready()
        assert self._socket is not None
        (job.directory / "ranks").mkdir(parents=True, exist_ok=True)
        if job.helpers:
            (job.directory / HELPERS / "ranks").mkdir(parents=True, exist_ok=True)
        self._rendezvous = tempfile.mkdtemp(prefix="sumgrad-")
        request = {
            "target": job.target,
            "arguments": dict(job.arguments),
            "num_ranks": job.num_ranks,
            "helpers": [{"target": h.target, "arguments": dict(h.arguments)} for h in job.helpers],
            "directory": str(job.directory.resolve()),
            "rendezvous": os.path.join(self._rendezvous, "store"),
            "timeout_s": job.timeout_s,
            "helper_patience": job.helper_patience,
            "start": job.start,
            "cwd": os.getcwd(),
            "sys_path": sys.path,
            "environ": dict(os.environ),
        }
        self._socket.sendall((json.dumps(request) + "\n").encode())

    def collect(self, job: RankJob, *, progress: Progress = lambda _: None) -> list[RankOutcome]:
        """Wait for a submitted job's ranks."""
        ends: dict[int, dict[str, Any]] = {}
        everyone = job.num_ranks + len(job.helpers)
        try:
            while "done" not in (event := self._event()):
                ends[event["rank"]] = event
                num_ended = sum(rank < job.num_ranks for rank in ends)
                waiting = "; waiting for the reference" if num_ended == job.num_ranks else ""
                progress(f"{num_ended} of {job.num_ranks} ranks ended{waiting}")
        except LaunchError as error:
            return [_lost(job, rank, ends.get(rank), str(error)) for rank in range(everyone)]
        finally:
            _remove(self._rendezvous)
        return [_outcome(job, rank, ends[rank]) for rank in range(everyone)]

    def close(self) -> None:
        """End the server, and with it any rank that still runs."""
        if self._process is None or self._socket is None:
            return
        self._lines.close()
        self._socket.close()
        if self.threads is None:  # still importing: it would not notice
            self._process.kill()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = self._socket = self.threads = None

    def _event(self) -> dict[str, Any]:
        line = self._lines.readline()
        if not line:
            assert self._process is not None
            try:
                code: int | None = self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                code = None
            raise LaunchError(f"the fork server ended with exit code {code}")
        data: dict[str, Any] = json.loads(line)
        return data


def _read_on_import() -> dict[str, str]:
    """The variables that what a server preloads may read once, when it is imported."""
    return {name: value for name, value in os.environ.items() if name.startswith(READ_ON_IMPORT)}


def _outcome(job: RankJob, rank: int, end: dict[str, Any]) -> RankOutcome:
    helper = rank - job.num_ranks
    if helper >= 0:
        directory = job.directory / HELPERS
        return outcome_from_record(directory, helper, "helper", exit_code=end["exit_code"])
    return outcome_from_record(job.directory, rank, _pool(job, rank), exit_code=end["exit_code"])


def _lost(job: RankJob, rank: int, end: dict[str, Any] | None, why: str) -> RankOutcome:
    if end is not None:
        return _outcome(job, rank, end)
    return RankOutcome(rank=rank, pool=_pool(job, rank), status="missing", detail=why)


def _pool(job: RankJob, rank: int) -> str:
    if rank >= job.num_ranks:
        return "helper"
    return job.pools[rank] if job.pools else ""


def _remove(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
