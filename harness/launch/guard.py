"""One rank's process: its environment, its watchdog, and the record of how it ended.

Both launchers run this: the fork server's children call `enter_rank`, torchrun's workers use
`RankGuard` themselves. A rank that hangs in C++ still writes down in which operation, because the
watchdog is a thread and gloo waits without the interpreter's lock; a rank that aborts leaves its
ledger and faulthandler's traceback.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sumgrad.base.files import write_json
from sumgrad.base.outcome import describe_operation
from sumgrad.record.endings import rank_file

EXIT_RAISED, EXIT_TIMED_OUT = 1, 124
HELPERS = "helpers"
LAST_WORDS_S = 1.5  # ranks that hang together write their records before the first one ends
LOST_ANOTHER = "lost its connection to another rank"
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """Where a rank is. directory: the run's, shared; rendezvous: a fresh file for a FileStore."""

    rank: int
    world_size: int
    directory: Path
    rendezvous: Path
    timeout_s: float

    def file(self, suffix: str) -> Path:
        """This rank's own file in the run directory, e.g. `ranks/rank_00003.json`."""
        return rank_file(self.directory, self.rank, suffix)


class RankGuard:
    """Writes exactly one end record of this process, whoever ends it first.

    ledger: set by the rank once it has one; its open operation goes into the record.
    on_stop: called after the record of a rank that was stopped, before the process ends.
    """

    def __init__(self, env: RankEnv, *, on_stop: Callable[[], int] | None = None) -> None:
        self.env, self.on_stop = env, on_stop
        self.ledger: Any = None
        self._started, self._lock, self._ended = time.monotonic(), threading.Lock(), False
        self._counted_from = self._started
        self._main = threading.main_thread().ident
        self._reader, self._writer = os.pipe()
        self._closing = False
        self.stopping = False  # whether a signal or the deadline ends this rank
        self._pid = os.getpid()

    def start(self) -> None:
        """Arm the deadline and the stop signals. Call from the main thread."""
        os.set_blocking(self._writer, False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        os.register_at_fork(  # a child that is stopped at once must not write to our pipe
            before=lambda: _block(signal.SIG_BLOCK),
            after_in_parent=lambda: _block(signal.SIG_UNBLOCK),
            after_in_child=self._forget,
        )
        with self.env.file(".stack").open("w") as file:
            self._stack_fd = os.dup(file.fileno())
        self.renew()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="sumgrad-watchdog")
        self._thread.start()

    def renew(self) -> None:
        """Count the deadline from now: one of several runs in this process begins."""
        self._counted_from = time.monotonic()
        faulthandler.dump_traceback_later(self.env.timeout_s + 1, file=self._stack_fd)

    def finish(self, status: str, **extra: Any) -> bool:
        """Write the end record once; False if it was already written.

        A process that a step forked and that comes back through here writes none.
        """
        if os.getpid() != self._pid:
            return False
        faulthandler.cancel_dump_traceback_later()
        record = {
            "rank": self.env.rank,
            "status": status,
            "seconds": round(time.monotonic() - self._started, 3),
            "ended_at": time.time(),
            **extra,
        }
        with self._lock:
            if self._ended:
                return False
            write_json(self.env.file(".json"), record)
            self._ended = True
        return True

    def raised(self, error: BaseException) -> bool:
        """The end record of an exception, with its traceback and the operation it came from."""
        stack = "".join(traceback.format_exception(error))
        return self.finish(
            "raised", detail=_one_line(error), stack=stack, waiting_in=self._waiting_in()
        )

    def close(self) -> None:
        """End the watchdog; the process goes on."""
        self._closing = True
        signal.set_wakeup_fd(-1)
        os.write(self._writer, b"\0")
        self._thread.join()

    def _forget(self) -> None:
        """In a process that a step forks: this rank's signals are none of its business."""
        if not self._closing:
            signal.set_wakeup_fd(-1)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
        _block(signal.SIG_UNBLOCK)

    def _wait(self) -> int | None:
        """The signal that stops this rank; 0 at the deadline, None when the guard is closed.

        Other signals that have a handler (a step's own alarm) come this way too and mean nothing.
        """
        while True:
            left = self._counted_from + self.env.timeout_s - time.monotonic()
            ready, _, _ = select.select([self._reader], [], [], max(left, 0))
            if self._closing:
                return None
            if not ready and left > 0:
                continue  # it may have been renewed meanwhile
            if not ready:
                return 0
            if (number := os.read(self._reader, 1)[0]) in STOP_SIGNALS:
                return number

    def _stopped(self, number: int) -> tuple[str, str]:
        """Status and words for a signal, or for the deadline."""
        if not number:
            return "timed_out", f"timed out after {self.env.timeout_s:g} s"
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            return "timed_out", f"stopped by {name}: others were gone, or all stood still"
        if self.on_stop is not None:
            return "timed_out", f"stopped by {name}: another rank is gone, or the run was ended"
        return "killed", f"stopped by {name}, which the launcher never sends"

    def _watch(self) -> None:
        if (number := self._wait()) is None:
            return
        self.stopping = True
        frames = sys._current_frames()
        frame = frames.get(self._main) if self._main else None
        status, why = self._stopped(number)
        try:
            self.finish(
                status,
                detail=why,
                waiting_in=self._waiting_in(),
                stack="".join(traceback.format_stack(frame)) if frame else None,
            )
            if not number:
                time.sleep(LAST_WORDS_S)
            code = self.on_stop() if self.on_stop else EXIT_TIMED_OUT
        except BaseException:
            traceback.print_exc()
            code = EXIT_TIMED_OUT
        flush()
        os._exit(code)

    def _waiting_in(self) -> str | None:
        return describe_operation(self.ledger.waiting_for()) if self.ledger else None


def enter_rank(env: RankEnv, target: str, arguments: dict[str, Any]) -> int:
    """Run `target(guard, **arguments)` as this rank and return the process's exit code.

    target: `module:function` or `file.py:function`; what it returns (JSON) is kept in the record.
    """
    faulthandler.enable(all_threads=False)
    guard = RankGuard(env)
    guard.start()
    try:
        result = load_target(target)(guard, **arguments)
        guard.finish("ok", **({"result": result} if result is not None else {}))
        return EXIT_TIMED_OUT if guard.stopping else 0  # told to end while it wrote its last
    except BaseException as error:
        guard.raised(error)
        traceback.print_exc()
        return EXIT_RAISED
    finally:
        flush()


@contextmanager
def own_exit_functions() -> Iterator[None]:
    """In a forked process: run at the end what was registered in it, as at an interpreter's exit.

    What the parent had registered is the parent's.
    """
    atexit._clear()
    try:
        yield
    finally:
        atexit._run_exitfuncs()


def load_target(target: str) -> Any:
    """The function that `module:function` or `file.py:function` names."""
    name, _, attribute = target.rpartition(":")
    if name.endswith(".py"):
        from sumgrad.subjects.loading import import_file

        module = import_file(Path(name))
    else:
        module = importlib.import_module(name)
    return getattr(module, attribute)


HINTS = {
    "PREMUL_SUM": "Gloo has none: let FSDP2 sum by set_force_sum_reduction_for_comms(True), beside "
    "set_gradient_divide_factor",
    "SyncBatchNorm layers only work with GPU": "on CPU tensors it works without DDP, with "
    "gradients reduced by hand",
}  # of torch's own errors: words in them, and what a user can do here


def lost_another(error: BaseException) -> bool:
    """Whether this is how the end of another rank shows: it says nothing of this one."""
    return any(words in " ".join(str(error).split()) for words in LOST)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if lost_another(error):
        return LOST_ANOTHER
    said = f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__
    return next((f"{said} ({hint})" for words, hint in HINTS.items() if words in text), said)


def _block(how: int) -> None:
    signal.pthread_sigmask(how, STOP_SIGNALS)


def flush() -> None:
    """Write out what this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
