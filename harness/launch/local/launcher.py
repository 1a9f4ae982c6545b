"""The local launcher: ranks on this machine, started from a warm fork server.

    with Launcher() as launcher:
        outcomes = launcher.run(RankJob(target="module:function", num_ranks=10, directory=run_dir))

One outcome for each rank, whatever happens; what the others wrote is kept; no process is left
behind, also after Ctrl-C or when this process is killed. For many machines use torchrun.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from sumgrad.base.errors import LaunchError
from sumgrad.base.interpreter import server_environment
from sumgrad.base.limits import too_few_files
from sumgrad.base.memory import kills_for_want_of_memory
from sumgrad.base.outcome import RankOutcome
from sumgrad.launch.guard import HELPERS
from sumgrad.launch.local.conversation import Conversation
from sumgrad.launch.local.processes import HELD, end_tagged, kill
from sumgrad.record.endings import outcome_from_record
from sumgrad.record.spec import RunSpec

Progress = Callable[[str], object]
SINGLE_THREAD = {
    name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
}
# Large tensors on huge pages, where the kernel has them: half of the time of a large model goes
# into page faults. Read when torch allocates first, so the server does that before it forks.
OUT_OF_MEMORY = "this machine ran out of memory meanwhile: fewer ranks, rows or --steps need less"
MEMORY = {"THP_MEM_ALLOC_ENABLE": "1"}
READ_ON_IMPORT = (
    "ATEN", "CUDA", "GLOO", "KMP", "LD_", "MALLOC", "MKL", "NCCL", "OMP", "OPENBLAS", "PYTHON",
    "PYTORCH", "TORCH", "TRITON",
)  # fmt: skip
# Read when it is used, and set by torch itself, in whichever process imports Inductor.
READ_LATER = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
START_LIMIT_S = 300.0  # torch from a cold disk
SILENCE_S = 30.0  # the server says a word every second while a job runs
CLOSE_S = 10.0
TICK_S = 1.0
TAG = "SUMGRAD_LAUNCHER"  # whose ranks a process descends from
SERVER = "sumgrad.launch.local.fork_server"
PRELOAD_TORCH = ("torch", "torch.distributed", "torch._dynamo", "safetensors.torch")


Start = Literal["fork", "spawn"]
START: Start = "fork" if sys.platform == "linux" else "spawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Helper:
    """`target(guard, **arguments)` in one process beside the ranks, outside their group."""

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """`target(guard, **arguments)` on every rank. directory: exists, empty; holds `ranks/`.

    helpers: processes of no rank that run at the same time, recorded under `helpers/`.
    watch: says how far the job is, asked every second. pools: rank -> pool name, for the outcomes.
    timeout_s: seconds until every rank must be done with each of its `runs`, see RankGuard.renew();
    helpers, which may be references of large batches, have `helper_patience` times as long.
    """

    target: str
    num_ranks: int
    directory: Path
    arguments: Mapping[str, Any] = field(default_factory=dict)
    pools: Sequence[str] = ()
    helpers: Sequence[Helper] = ()
    timeout_s: float = 60.0
    runs: int = 1
    helper_patience: int = 10
    watch: Callable[[], str] = lambda: ""
    start: Start = START


def start_of(spec: RunSpec) -> Start:
    """How the ranks of a run are started."""
    return start_where(spec.facts.hashed if spec.facts is not None else ())


def start_where(hashed: Sequence[str]) -> Start:
    """hashed: lines that go by hashes, whose salt ranks share that are forked."""
    return "spawn" if hashed else START


class Launcher:
    """A fork server and the socket to it. Use as a context manager; `run` as often as you like."""

    def __init__(self, *, preload: Sequence[str] = ()) -> None:
        self._preload = [
            *PRELOAD_TORCH,
            "sumgrad.launch.rank",
            "sumgrad.launch.probe",
            "sumgrad.subjects.planned.job",
            "sumgrad.workloads.three_pool.workload",
            "torch.distributed.fsdp",
            "torch.distributed.tensor.parallel",
            "torch.distributed.pipelining",
            *preload,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self._read_on_import: dict[str, str] = {}
        self._server: Conversation | None = None
        self._scratch = Path(tempfile.gettempdir(), f"sumgrad-{uuid.uuid4().hex}")
        self._tag = {TAG: self._scratch.name}
        self._numbers = itertools.count(1)
        self._job = 0  # the number of the last request
        self._in_step = False  # whether the server is known to run nothing and to listen
        self._out_of_memory = 0  # how often, before the running job
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
            self._drop_server()
        self._read_on_import = _read_on_import()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", SERVER, "--serve", str(theirs.fileno())]
        try:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(self._scratch), *self._preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**MEMORY, **os.environ, **server_environment(), **SINGLE_THREAD, **self._tag},
                start_new_session=True,  # Ctrl-C and a killed group are for us to answer
            )
            self._server = Conversation(ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def wait_ready(self) -> None:
        """Wait until the server has imported everything and runs nothing. Raises LaunchError."""
        self.start()
        if not self._in_step:
            self._synchronise(START_LIMIT_S)

    def preload(self, modules: Sequence[str]) -> None:
        """Have the server import these for all later ranks, whatever they run. Raises LaunchError.

        In the environment that the server started with: a library may look at it on import.
        """
        self.wait_ready()
        assert self._server is not None
        self._in_step = False
        try:
            self._server.send({"preload": list(modules), "sys_path": sys.path})
        except EOFError:
            raise self._died() from None

    @contextmanager
    def temporary_directory(self) -> Iterator[Path]:
        """A directory for this launcher's runs that is removed even if this process is killed."""
        self.wait_ready()
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as name:
            yield Path(name)

    def run(self, job: RankJob, *, progress: Progress = lambda _: None) -> list[RankOutcome]:
        """Run a job to its end; exactly one outcome for each rank, then each helper, in order.

        What is raised in this process meanwhile (Ctrl-C, a test's time limit) ends the ranks.
        """
        try:
            self.submit(job)
            return self.collect(job, progress=progress)
        except LaunchError as error:
            return [_lost(job, rank, None, str(error)) for rank in range(_everyone(job))]
        except BaseException:
            self._abandon()
            raise

    def submit(self, job: RankJob) -> None:
        """Start a job's ranks; this process can go on with other work before `collect`.

        A job that was not collected is ended. Raises LaunchError.
        """
        self.wait_ready()
        assert self._server is not None
        few = too_few_files(job.num_ranks)
        if few:
            raise LaunchError(few)
        (job.directory / "ranks").mkdir(parents=True, exist_ok=True)
        if job.helpers:
            (job.directory / HELPERS / "ranks").mkdir(parents=True, exist_ok=True)
        self._in_step = False
        self._out_of_memory = kills_for_want_of_memory()
        self._job = next(self._numbers)
        request = {
            "id": self._job,
            "target": job.target,
            "arguments": dict(job.arguments),
            "num_ranks": job.num_ranks,
            "helpers": [{"target": h.target, "arguments": dict(h.arguments)} for h in job.helpers],
            "directory": str(job.directory.resolve()),
            "rendezvous": os.path.join(self._scratch, f"rendezvous-{self._job}", "store"),
            "timeout_s": job.timeout_s,
            "runs": job.runs,
            "helper_patience": job.helper_patience,
            "start": job.start,
            "cwd": os.getcwd(),
            "sys_path": sys.path,
            "environ": {**os.environ, **self._tag},
        }
        try:
            self._server.send(request)
        except EOFError:
            raise self._died() from None

    def collect(self, job: RankJob, *, progress: Progress = lambda _: None) -> list[RankOutcome]:
        """Wait for a submitted job's ranks."""
        ends: dict[int, dict[str, Any]] = {}
        try:
            while "done" not in (event := self._event()):
                if "rank" in event:
                    ends[event["rank"]] = event
                num_ended = sum(rank < job.num_ranks for rank in ends)
                ended = f"{num_ended} of {job.num_ranks} ranks ended" if job.num_ranks else ""
                progress("; ".join(filter(None, [ended, job.watch()])))
            self._in_step = True
        except LaunchError as error:
            return [_lost(job, r, ends.get(r), str(error)) for r in range(_everyone(job))]
        except BaseException:
            self._abandon()
            raise
        outcomes = [_outcome(job, rank, ends[rank]) for rank in range(_everyone(job))]
        killed = self._ran_out_of_memory()
        return [_out_of_memory(outcome, killed) for outcome in outcomes]

    def _ran_out_of_memory(self) -> int:
        """How many processes the kernel ended for want of memory since the job began."""
        return kills_for_want_of_memory() - self._out_of_memory

    def close(self) -> None:
        """End the server, and with it any rank that still runs."""
        self._drop_server()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def end(self) -> None:
        """`close` for a signal handler: it may interrupt any other method, and takes no lock."""
        if self._process is not None:
            for number in (signal.SIGTERM, signal.SIGCONT):
                kill(self._process.pid, number)
            deadline = time.monotonic() + CLOSE_S
            while (running := _runs(self._process.pid)) and time.monotonic() < deadline:
                time.sleep(0.005)
            if running:
                kill(self._process.pid, signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _drop_server(self) -> None:
        process, server = self._process, self._server
        self._process = self._server = self.threads = None
        self._in_step = False
        if process is None:
            return
        if server is not None:
            server.close()
        process.terminate()
        process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode < 0:  # it could not end what its ranks had started
            end_tagged(TAG, self._tag[TAG])

    def _synchronise(self, limit_s: float) -> None:
        """End whatever the server does and drop what it said of it. Raises LaunchError."""
        assert self._server is not None
        number = next(self._numbers)
        self._in_step = False
        deadline = time.monotonic() + limit_s
        try:
            self._server.send({"sync": number})
            while (answer := self._server.receive(TICK_S) or {}).get("synced") != number:
                if time.monotonic() > deadline:
                    raise self._died(f"did not answer within {limit_s:g} s")
        except EOFError:
            raise self._died() from None
        self.threads = int(answer["threads"])
        self._in_step = True

    def _abandon(self) -> None:
        """End a job that nobody waits for any more; if the server does not answer, end that."""
        if self._server is None:
            return
        try:
            self._synchronise(CLOSE_S)
        except LaunchError:
            return
        except BaseException:
            self._drop_server()
            raise

    def _event(self) -> dict[str, Any]:
        """The next word about the running job. Raises LaunchError, also after a long silence."""
        assert self._server is not None
        silent = 0
        while silent * TICK_S < SILENCE_S:  # counted, so that a stop of this process is no silence
            try:
                event = self._server.receive(TICK_S)
            except EOFError:
                raise self._died() from None
            if event is not None and event.get("id") == self._job:
                return event
            silent += event is None
        raise self._died(f"was silent for {SILENCE_S:g} s")

    def _died(self, how: str | None = None) -> LaunchError:
        """What became of the server, which is gone for good after this."""
        process = self._process
        assert process is not None
        if how is None:
            try:
                how = f"ended with exit code {process.wait(timeout=CLOSE_S)}"
                if process.returncode == -signal.SIGKILL and self._ran_out_of_memory() > 0:
                    how += f"; {OUT_OF_MEMORY}"
            except subprocess.TimeoutExpired:
                how = "closed its connection"
        self._drop_server()
        return LaunchError(f"the fork server {how}")


def _everyone(job: RankJob) -> int:
    return job.num_ranks + len(job.helpers)


def _read_on_import() -> dict[str, str]:
    """The variables that what a server preloads may read once, when it is imported."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(READ_ON_IMPORT) and name not in READ_LATER
    }


def _outcome(job: RankJob, rank: int, end: dict[str, Any]) -> RankOutcome:
    helper = rank >= job.num_ranks
    outcome = outcome_from_record(
        job.directory / HELPERS if helper else job.directory,
        rank - job.num_ranks if helper else rank,
        _pool(job, rank),
        exit_code=end["exit_code"],
    )
    if end["killed"] and outcome.status == "killed":
        detail = "did not end when it was asked to; killed by the launcher"
        if end["stopped"]:
            detail = HELD
        return replace(outcome, detail=detail, by_launcher=True)
    return outcome


def _out_of_memory(outcome: RankOutcome, killed: int) -> RankOutcome:
    by_kernel = outcome.exit_code == -signal.SIGKILL and not outcome.by_launcher
    if not by_kernel or killed <= 0:
        return outcome
    return replace(outcome, detail=f"{outcome.detail}; {OUT_OF_MEMORY}")


def _lost(job: RankJob, rank: int, end: dict[str, Any] | None, why: str) -> RankOutcome:
    if end is not None:
        return _outcome(job, rank, end)
    return RankOutcome(rank=rank, pool=_pool(job, rank), status="missing", detail=why)


def _pool(job: RankJob, rank: int) -> str:
    if rank >= job.num_ranks:
        return "helper"
    return job.pools[rank] if job.pools else ""


def _runs(pid: int) -> bool:
    """Whether a child of this process still runs. Collects it; takes no lock."""
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False
