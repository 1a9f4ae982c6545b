"""One worker of torchrun from its first record to its exit code; the lowest living one judges.

A rank that raises or is stopped still writes its record first, so a verdict comes out whoever
died. Nobody here can ask for a rank's exit code, so its last act is to say that it leaves; a rank
that ends without a word was killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from sumgrad.base.files import write_json
from sumgrad.base.outcome import RankOutcome
from sumgrad.base.verdict import EXIT_CODES, Verdict
from sumgrad.launch.again.trace import trace_step
from sumgrad.launch.check import Run, finish
from sumgrad.launch.guard import RankEnv, RankGuard, flush, lost_another
from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.local.processes import adopt_orphans, end_children
from sumgrad.launch.torchrun.agent import (
    FAILED,
    Listener,
    Store,
    StoreGone,
    end_agent,
    keeps_its_agent,
)
from sumgrad.launch.torchrun.others import LEFT, PROCESS, Others
from sumgrad.record.endings import outcome_from_record
from sumgrad.record.spec import RunSpec

STOP_JUDGE_S = 20.0
REFERENCE_PATIENCE = 10
VERDICT = "sumgrad/verdict"  # of the store: the exit code

Report = Callable[[Verdict, Path], None]
Progress = Callable[[str], object]


def alone(what: str) -> NoReturn:
    """No verdict comes from the host of rank 0, none can be sent."""
    ended_unknown(
        f"the host of rank 0 does not answer {socket.gethostname()} any more; "
        f"rank {os.environ['RANK']} here: {what}"
    )


def ended_unknown(why: str) -> NoReturn:
    """End this rank, and its agent, without a verdict."""
    sys.stderr.write(f"sumgrad: UNKNOWN: {why}\n")
    end_children()
    flush()
    end_agent()
    os._exit(EXIT_CODES["unknown"])


class Member:
    """One torchrun worker from its first record to its exit code."""

    def __init__(
        self,
        env: RankEnv,
        spec: RunSpec,
        store: Store,
        *,
        shared: bool,
        report: Report,
        progress: Progress,
    ) -> None:
        self.env, self.spec = env, spec
        self.store, self.shared = store, shared
        self.others = Others(env, store, shared=shared)
        self.report, self.progress = report, progress
        self.failed = self.told_to_end = False
        who = {"pid": os.getpid(), "host": socket.gethostname()}
        write_json(env.file(PROCESS), who)
        if not shared:
            store.set(f"sumgrad/remote/{env.rank}", "1")

    def run(self, store: Any) -> int:
        import torch.distributed as dist
        from sumgrad.launch.rank import GROUP_PATIENCE_S, meet, run_rank, start_ledger
        from sumgrad.ledger.process_group import BACKEND

        adopt_orphans()
        guard = RankGuard(self.env, on_stop=self._stopped)
        guard.start()
        self.progress(f"connecting {self.env.world_size} ranks")
        listener: Listener | None = None
        try:
            ledger = start_ledger(guard, self.spec.device)
            listener = Listener(
                self.store, lambda: (ledger.waiting_for() or {}).get("n"),
                seconds=self.env.timeout_s,
            )  # fmt: skip
            dist.init_process_group(
                BACKEND,
                store=store,
                rank=self.env.rank,
                world_size=self.env.world_size,
                timeout=timedelta(seconds=self.env.timeout_s + GROUP_PATIENCE_S),
            )
            meet(ledger)
            self.progress("running the step")
            result = run_rank(guard, self.spec, ledger)
            dist.destroy_process_group()
            ledger.redirect(None)  # what is judged must not grow while it is judged
            guard.finish("ok", result=result)
        except BaseException as error:
            self.failed = guard.raised(error)
            if not lost_another(error):
                traceback.print_exc()
        if listener is not None:
            listener.close()
        guard.close()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        patience = (
            self.env.timeout_s if not self.failed else min(self.env.timeout_s, STOP_JUDGE_S / 2)
        )
        return self._after(deadline=time.monotonic() + patience)

    def _stopped(self) -> int:
        """Called by the watchdog: torchrun is ending us, or the deadline passed."""
        self.failed = self.told_to_end = True
        return self._after(deadline=time.monotonic() + STOP_JUDGE_S / 2)

    def _after(self, *, deadline: float) -> int:
        try:
            return self._with_the_others(deadline)
        except StoreGone:
            self._cut_off()

    def _cut_off(self) -> NoReturn:
        """End alone, with what this rank did last."""
        here = outcome_from_record(
            self.env.directory, self.env.rank, self.spec.topology.pool_of(self.env.rank).name
        )
        what = here.status + (f", {here.detail}" if here.detail else "")
        what += f", waiting in {here.waiting_in}" if here.waiting_in else ""
        alone(f"{what}; its record is in {self.env.directory}")

    def _with_the_others(self, deadline: float) -> int:
        if self.failed:
            with suppress(RuntimeError):
                self.store.set(FAILED, str(self.env.rank))
        if not self.shared:
            self.others.send_files()
        if self.env.rank != self.others.lowest_living():
            self._leave(self._wait_for_verdict(deadline) if self.failed else 0)
        self.others.collect(deadline)
        verdict = self._judge()
        self.report(verdict, self.env.directory)
        end_children()
        with suppress(RuntimeError):
            self.store.set(VERDICT, str(verdict.exit_code))
        return verdict.exit_code

    def _leave(self, code: int) -> NoReturn:
        """End this process: what it started, what it registered for its exit, its last word."""
        _run_exit_functions()
        end_children()
        flush()
        if self.shared:
            write_json(self.env.file(LEFT), {"exit_code": code})
        else:
            self.store.set(f"sumgrad/left/{self.env.rank}", str(code))
        if keeps_its_agent(os.environ) and not self.told_to_end:
            try:
                code = self._code_of_the_verdict() or code
            except StoreGone:
                self._cut_off()
        os._exit(code)

    def _code_of_the_verdict(self) -> int:
        """What the judging rank ends with, or 1 where that is not to be learnt any more."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nothing is left to be written
        deadline = time.monotonic() + (REFERENCE_PATIENCE + 1) * self.env.timeout_s
        while time.monotonic() < deadline:
            if self.store.check(VERDICT):
                return int(self.store.get(VERDICT))
            time.sleep(0.05)
        return 1

    def _judge(self) -> Verdict:
        from sumgrad.launch.rank import store_reference
        from sumgrad.subjects.subject import subject_of

        problems = []
        for piece in subject_of(self.spec).pieces():
            try:
                with _limit(REFERENCE_PATIENCE * self.env.timeout_s):
                    store_reference(self.env.directory, self.spec, piece, progress=self.progress)
            except Exception as error:
                problems.append(f"the reference of {piece}: {type(error).__name__}: {error}")
        _run_exit_functions()  # if this rank's own exit kills it, there is no verdict
        run = Run(
            directory=self.env.directory,
            spec=self.spec,
            outcomes=[self._outcome(rank) for rank in range(self.env.world_size)],
            look=self._look_again if self.spec.opaque and _on_one_host() else None,
        )
        return finish(run, problems=problems, progress=self.progress)

    def _look_again(self, tier: str, step: int) -> str | None:
        """The failing step once more, with eyes on its modules, on ranks of this process's own."""
        with Launcher() as launcher:
            return trace_step(
                self.env.directory, self.spec, tier, step, launcher=launcher, progress=self.progress
            )

    def _outcome(self, rank: int) -> RankOutcome:
        gone = self.others.gone(rank)  # before looking for its last word
        pool = self.spec.topology.pool_of(rank).name
        outcome = outcome_from_record(self.env.directory, rank, pool)
        if not outcome.ok or rank == self.env.rank or self.others.has_left(rank):
            return outcome
        if gone:
            detail = "its process was killed, or its exit failed, after it had finished"
            return replace(outcome, status="killed", exit_code=None, detail=detail)
        detail = "had finished, but its process did not end"
        return replace(outcome, status="timed_out", exit_code=None, detail=detail)

    def _wait_for_verdict(self, deadline: float) -> int:
        """A rank that failed stays until there is a verdict: its end would end the judge."""
        while time.monotonic() < deadline and self.shared:
            if (self.env.directory / "verdict.json").exists() or self.others.lowest_living() == (
                self.env.rank
            ):
                break
            time.sleep(0.05)
        return 1


@contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread after some seconds; elsewhere torchrun's own limit holds."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _on_one_host() -> bool:
    """Whether torchrun started every rank here."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _run_exit_functions() -> None:
    """What was registered for the interpreter's exit; not while the main thread hangs."""
    if threading.current_thread() is threading.main_thread():
        atexit._run_exitfuncs()
