"""One run of a script: its processes started, waited for, and ended for good.

A side is either so many ranks of one command, started here with the environment that torchrun
gives, or a command of the user's own, which starts its ranks itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from sumgrad.base.files import PACKAGE
from sumgrad.base.outcome import RankOutcome
from sumgrad.launch.local.ports import held_port
from sumgrad.launch.local.processes import HELD, end_tagged, kill_group, state_of
from sumgrad.launch.local.rank_log import RankLog
from sumgrad.launch.local.standstill import Standstill
from sumgrad.launch.script import boot
from sumgrad.record.endings import outcome_from_record, rank_file, read_end_record
from sumgrad.subjects.script.asked import VARIABLE, Asked, write_asked

TAG, MARK = "SUMGRAD_SIDE", "SUMGRAD_SIDES"  # whose processes they are, in their environment
OTHERS_S = 5.0  # that ranks are given when one of them ended badly
LATE_S = 5.0  # that a rank's own watchdog may take at the deadline
POLL_S = 0.05
POOL = "ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a side runs. ranks: how many of it are started here; 0 where it starts its own.

    environment: what its processes have in theirs besides.
    """

    words: tuple[str, ...]
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a side ended: every rank of it, and how long it took. output: where it printed."""

    outcomes: tuple[RankOutcome, ...]
    seconds: float
    output: Path

    @property
    def ok(self) -> bool:
        return bool(self.outcomes) and all(o.ok for o in self.outcomes)


def new_mark() -> str:
    """What every process of some sides has in its environment, wherever it comes from."""
    return uuid.uuid4().hex


def end_all(mark: str) -> None:
    """End every process of the sides that have this mark."""
    end_tagged(MARK, mark)


def run_side(
    command: Command,
    asked: Asked,
    *,
    mark: str | None = None,
    progress: Callable[[str], object] = lambda _: None,
) -> Ended:
    """Run it to its end, or to the deadline. Nobody is left when this returns or raises.

    mark: of all sides that `end_all` is to end together.
    """
    directory, started = Path(asked.directory), time.monotonic()
    (directory / "ranks").mkdir(parents=True, exist_ok=True)
    own = new_mark()
    base = _environment(directory, write_asked(asked))
    base |= {TAG: own, MARK: mark or own}
    processes: list[subprocess.Popen[bytes]] = []
    logs: list[RankLog] = []
    stop = threading.Event()
    reader = threading.Thread(target=_drain, args=(logs, stop), daemon=True)
    with _environments(command) as environments:
        try:
            for rank, more in enumerate(environments):
                log = RankLog(rank_file(directory, rank, ".log"))
                logs.append(log)
                processes.append(
                    subprocess.Popen(
                        command.words,
                        env={**base, **command.environment, **more},
                        stdin=subprocess.DEVNULL,
                        stdout=log.writer,
                        stderr=log.writer,
                        start_new_session=True,
                    )
                )
                os.close(log.writer)
            reader.start()
            _wait(processes, asked.seconds, directory, progress, starts_its_own=not command.ranks)
        finally:
            held = [p.poll() is None and state_of(p.pid) in ("T", "t") for p in processes]
            for process in processes:
                kill_group(process.pid, signal.SIGKILL)
            end_tagged(TAG, own)
            codes = [process.wait() for process in processes]
            stop.set()
            if reader.is_alive():
                reader.join()
            for log in logs:
                log.close()
    return Ended(
        outcomes=tuple(_outcomes(command, directory, codes, held)),
        seconds=time.monotonic() - started,
        output=rank_file(directory, 0, ".log"),
    )


def _environment(directory: Path, asked: Path) -> dict[str, str]:
    """The user's, with our bootstrap where Python looks first."""
    folder = directory / "boot"
    folder.mkdir(exist_ok=True)
    shutil.copy(boot.__file__, folder / "sitecustomize.py")
    package = directory / "package"  # for an environment that has no sumgrad
    package.mkdir(exist_ok=True)
    if not (package / "sumgrad").exists():
        (package / "sumgrad").symlink_to(PACKAGE)
    before = os.environ.get("PYTHONPATH")
    path = str(folder.resolve()) + (os.pathsep + before if before else "")
    own = {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        VARIABLE: str(asked.resolve()),
        boot.FALLBACK: str(package.resolve()),
        boot.LAUNCHER: str(os.getpid()),
    }
    return {**os.environ, **own}


def _environments(command: Command) -> AbstractContextManager[list[dict[str, str]]]:
    """What each process of a side has in its environment besides, while the block runs."""
    return rank_environments(command.ranks) if command.ranks else nullcontext([{}])


@contextmanager
def rank_environments(ranks: int) -> Iterator[list[dict[str, str]]]:
    """What torchrun gives each of so many ranks on one machine. The port is theirs in the block.

    A script may ask whether torchrun has started it; there is no agent with a store of its own.
    """
    with held_port() as port:
        yield [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "ROLE_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "ROLE_WORLD_SIZE": str(ranks),
                "GROUP_WORLD_SIZE": "1",
                "ROLE_NAME": "default",
                "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "False",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for rank in range(ranks)
        ]


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    seconds: float,
    directory: Path,
    progress: Callable[[str], object],
    *,
    starts_its_own: bool,
) -> None:
    """Until all have ended, one has ended badly and the others had their time, they stand still,
    all that one started itself have ended well and it had its own, or the deadline.

    seconds: without a rank that takes its seat, and then from the last one's; importing torch on a
    busy machine is no part of what hangs.
    """
    deadline = time.monotonic() + seconds + LATE_S
    asked_to_end, seated, all_done = False, 0, False
    # A script may wait for what is not here, as for a download; a step does not.
    standstill = Standstill(lambda rank: (directory, rank), asleep_s=seconds)
    while True:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return
        now, before = time.monotonic(), seated
        seated = sum(1 for _ in (directory / "ranks").glob("rank_*.claim"))
        if seated > before and not asked_to_end:
            deadline = now + seconds + LATE_S
        ranks = [_Rank(rank=i, pid=p.pid, exit_code=p.poll()) for i, p in enumerate(processes)]
        stuck = len(ranks) > 1 and seated == len(ranks) and standstill.is_final(ranks, now)
        if (stuck or any(code for code in codes)) and not asked_to_end:
            deadline, asked_to_end = min(deadline, now + 2 * OTHERS_S), True
            soft = now if stuck else now + OTHERS_S
        if asked_to_end and now > soft:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGUSR1)
            soft = deadline + 1
        if starts_its_own and not (asked_to_end or all_done) and _all_ended_well(directory):
            # What started them may wait for ever for what they would have sent it.
            all_done, deadline = True, min(deadline, now + OTHERS_S)
        if now > deadline:
            return
        progress(f"{seated} ranks at work" if seated else "starting")
        time.sleep(POLL_S)


def _all_ended_well(directory: Path) -> bool:
    """Whether every rank of the side has seen what it was to see, as its end record says."""
    folder = directory / "ranks"
    ended = [int(path.stem.removeprefix("rank_")) for path in folder.glob("rank_*.json")]
    if not ended or len(ended) < sum(1 for _ in folder.glob("rank_*.claim")):
        return False
    ends = [read_end_record(directory, rank) or {} for rank in ended]
    sizes = [(end.get("result") or {}).get("world_size", 0) for end in ends]
    return len(ends) >= max(sizes) and all(end.get("status") == "ok" for end in ends)


@dataclass(slots=True, kw_only=True)
class _Rank:
    """As a standstill looks at it."""

    rank: int
    pid: int
    exit_code: int | None


def _drain(logs: Sequence[RankLog], stop: threading.Event) -> None:
    while not stop.wait(POLL_S):
        for log in list(logs):
            if log.open:
                log.drain()


def _outcomes(
    command: Command, directory: Path, codes: Sequence[int], held: Sequence[bool]
) -> Iterator[RankOutcome]:
    """held: ranks that a signal or a debugger had stopped when their time was over."""
    if command.ranks:
        for rank, (code, was_held) in enumerate(zip(codes, held, strict=True)):
            outcome = outcome_from_record(directory, rank, POOL, exit_code=code)
            if was_held and outcome.status == "killed":
                outcome = replace(outcome, detail=HELD, by_launcher=True)
            yield outcome
        return
    claimed = [int(p.stem.removeprefix("rank_")) for p in (directory / "ranks").glob("*.claim")]
    ends = [read_end_record(directory, rank) or {} for rank in claimed]
    sizes = [(end.get("result") or {}).get("world_size", 0) for end in ends]
    for rank in range(max([*sizes, *(rank + 1 for rank in claimed)], default=0)):
        yield outcome_from_record(directory, rank, POOL)


def interpreter() -> str:
    """The Python that runs this, as a script's command begins."""
    return sys.executable
