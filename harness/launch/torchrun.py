"""The check under torchrun: every rank runs this; the lowest living one judges.

Ranks find the run directory through the rendezvous store; where a rank cannot see it (another
machine, no shared disk), its files travel through the store. A rank that raises or is stopped still
writes its record first, so a verdict comes out whoever died. Nobody here can ask for a rank's exit
code, so its last act is to say that it leaves; a rank that ends without a word was killed.
"""

from __future__ import annotations

import atexit
import json
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

from sumgrad.base.commands import torchrun_prefix
from sumgrad.base.errors import UserError
from sumgrad.base.files import write_bytes, write_json
from sumgrad.base.outcome import RankOutcome
from sumgrad.base.verdict import EXIT_CODES, Verdict
from sumgrad.launch.agent import (
    FAILED,
    Listener,
    NotSaid,
    Store,
    StoreGone,
    end_agent,
    keeps_its_agent,
)
from sumgrad.launch.agreement import agree, asked_of
from sumgrad.launch.ask import CheckOptions, make_directory, make_spec, torchrun_command
from sumgrad.launch.check import Run, finish
from sumgrad.launch.guard import RankEnv, RankGuard, flush, lost_another
from sumgrad.launch.local.launcher import Launcher
from sumgrad.launch.local.processes import adopt_orphans, end_children
from sumgrad.launch.trace import trace_step
from sumgrad.record.endings import outcome_from_record, rank_file, read_end_record
from sumgrad.record.ranks import GRADS_FILE
from sumgrad.record.spec import RunSpec, write_spec
from sumgrad.topology.pools import load_topology

PROCESS, LEFT = ".process.json", ".left.json"  # who a rank is, and its last word
RECORD_SUFFIXES = (".safetensors", ".ledger.jsonl", ".stack", ".json")
STOP_JUDGE_S = 20.0
REFERENCE_PATIENCE = 10

VERDICT = "sumgrad/verdict"  # of the store: the exit code

Report = Callable[[Verdict, Path], None]
Progress = Callable[[str], object]


def under_torchrun() -> bool:
    """Whether torchrun (or anything that sets the same variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_torchrun_rank(
    options: CheckOptions, *, report: Report, progress: Progress = lambda _: None
) -> int:
    """Run this rank, judge if it is this rank's turn, and return the process's exit code.

    report: called by the judging rank with the verdict and its directory. progress: called by
    every rank with what it is doing.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_world_size(options, world_size)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    spec = make_spec(options, prefix=[*torchrun_prefix(world_size), "--topology"])
    wait = timedelta(seconds=options.timeout_s)
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", timeout=wait)))  # type: ignore[attr-defined]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        _ended_unknown(
            f"rank {rank} on {socket.gethostname()} did not reach {address}, where the ranks meet: "
            f"{str(error).splitlines()[0]}"
        )
    store.set_timeout(wait)
    kept = Store(store, seconds=options.timeout_s)
    try:
        agree(kept, rank, world_size, asked_of(spec))
        directory, shared = _agree_on_directory(kept, rank, options, spec)
    except StoreGone as gone:
        _alone(f"{gone}, while the ranks agreed on what to run")
    except NotSaid as silent:
        if rank == 0:
            time.sleep(
                1
            )  # whoever else waits hears it, before the store ends with this host's agent
        _ended_unknown(f"{silent}; rank {rank} has waited for it" if rank else str(silent))
    env = RankEnv(
        rank=rank,
        world_size=world_size,
        directory=directory,
        rendezvous=directory,
        timeout_s=options.timeout_s,
    )
    member = _Member(env, spec, kept, shared=shared, report=report, progress=progress)
    return member.run(dist.PrefixStore("sumgrad/group", store))  # type: ignore[attr-defined]


def check_world_size(options: CheckOptions, world_size: int) -> None:
    """UserError with the right command line if torchrun started another number of ranks."""
    topology = load_topology(options.topology)
    if topology.world_size != world_size:
        raise UserError(
            f"{options.topology}: got {world_size} ranks from torchrun, expected "
            f"{topology.world_size}; the right command is\n  "
            + torchrun_command(topology, options.topology)
        )


def _alone(what: str) -> NoReturn:
    """No verdict comes from the host of rank 0, none can be sent."""
    _ended_unknown(
        f"the host of rank 0 does not answer {socket.gethostname()} any more; "
        f"rank {os.environ['RANK']} here: {what}"
    )


def _ended_unknown(why: str) -> NoReturn:
    """End this rank, and its agent, without a verdict."""
    sys.stderr.write(f"sumgrad: UNKNOWN: {why}\n")
    end_children()
    flush()
    end_agent()
    os._exit(EXIT_CODES["unknown"])


def _agree_on_directory(
    store: Store, rank: int, options: CheckOptions, spec: RunSpec
) -> tuple[Path, bool]:
    """Rank 0 makes it; the others see it, or get a local one of their own."""
    key = "sumgrad/directory"
    if rank == 0:
        try:
            directory = make_directory(options, spec.topology.name).resolve()
            write_spec(directory, spec)
        except UserError as error:
            store.set(key, "!" + str(error))
            raise
        write_json(directory / "ranks" / "token.json", {"host": socket.gethostname()})
        store.set(key, str(directory))
        return directory, True
    text = store.get(key).decode()
    if text.startswith("!"):
        raise UserError(text[1:])
    directory = Path(text)
    if sees(directory):
        return directory, True
    local = make_directory(replace(options, out=None), spec.topology.name).resolve()
    write_spec(local, spec)
    return local, False


def sees(directory: Path) -> bool:
    """Whether this rank shares rank 0's run directory."""
    return (directory / "ranks" / "token.json").exists()


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


class _Member:
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
            ledger = start_ledger(guard)
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
        _alone(f"{what}; its record is in {self.env.directory}")

    def _with_the_others(self, deadline: float) -> int:
        if self.failed:
            with suppress(RuntimeError):
                self.store.set(FAILED, str(self.env.rank))
        if not self.shared:
            self._send_files()
        if self.env.rank != self._lowest_living():
            self._leave(self._wait_for_verdict(deadline) if self.failed else 0)
        self._collect(deadline)
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

    def _look_again(self, tier: str, step: int) -> bool:
        """The failing step once more, with eyes on its modules, on ranks of this process's own."""
        with Launcher() as launcher:
            return trace_step(
                self.env.directory, self.spec, tier, step, launcher=launcher, progress=self.progress
            )

    def _outcome(self, rank: int) -> RankOutcome:
        gone = self._gone(rank)  # before looking for its last word
        pool = self.spec.topology.pool_of(rank).name
        outcome = outcome_from_record(self.env.directory, rank, pool)
        if not outcome.ok or rank == self.env.rank or self._has_left(rank):
            return outcome
        if gone:
            detail = "its process was killed, or its exit failed, after it had finished"
            return replace(outcome, status="killed", exit_code=None, detail=detail)
        detail = "had finished, but its process did not end"
        return replace(outcome, status="timed_out", exit_code=None, detail=detail)

    def _has_left(self, rank: int) -> bool:
        """Whether a rank has said its last word."""
        left = rank_file(self.env.directory, rank, LEFT).exists()
        return left or self._has_key(f"sumgrad/left/{rank}")

    def _gone(self, rank: int) -> bool:
        """Whether a rank's process is known to exist no more; of another machine's it never is."""
        who = self._who(rank)
        return who is not None and who["host"] == socket.gethostname() and not _runs(who["pid"])

    def _who(self, rank: int) -> dict[str, Any] | None:
        try:
            who: dict[str, Any] = json.loads(
                rank_file(self.env.directory, rank, PROCESS).read_text()
            )
        except (OSError, ValueError):
            return None
        return who

    def _lowest_living(self) -> int:
        return next(r for r in range(self.env.world_size) if self._alive(r))

    def _alive(self, rank: int) -> bool:
        """A rank of this machine whose process exists; one of another machine counts as alive
        until it has left a record that it did not end well."""
        if rank == self.env.rank:
            return True
        if not self.shared:
            return rank == 0
        if (who := self._who(rank)) is None:
            return self._has_key(f"sumgrad/remote/{rank}") and not self._has_key(
                f"sumgrad/sent/{rank}"
            )
        if who["host"] != socket.gethostname():
            return read_end_record(self.env.directory, rank) is None or rank == 0
        return _runs(who["pid"])

    def _has_key(self, key: str) -> bool:
        try:
            return self.store.check(key)
        except RuntimeError:
            return False

    def _collect(self, deadline: float) -> None:
        """Wait for the others' records and last words, and fetch the records that travel."""
        others = [r for r in range(self.env.world_size) if r != self.env.rank]
        while time.monotonic() < deadline:
            if all(self._settled(rank) for rank in others):
                return
            time.sleep(0.05)

    def _settled(self, rank: int) -> bool:
        """Whether nothing more is to come of a rank; one that failed waits for the verdict."""
        record = read_end_record(self.env.directory, rank)
        if record is None:
            return not (self._fetch(rank) or self._alive(rank))
        return record["status"] != "ok" or self._gone(rank) or self._has_left(rank)

    def _wait_for_verdict(self, deadline: float) -> int:
        """A rank that failed stays until there is a verdict: its end would end the judge."""
        while time.monotonic() < deadline and self.shared:
            if (self.env.directory / "verdict.json").exists() or self._lowest_living() == (
                self.env.rank
            ):
                break
            time.sleep(0.05)
        return 1

    def _send_files(self) -> None:
        for suffix in RECORD_SUFFIXES:
            file = self.env.file(suffix)
            if file.exists():
                self.store.set(f"sumgrad/file/{self.env.rank}/{suffix}", file.read_bytes())
        for name in sorted(self._gradient_files(self.env.rank)):
            if not self._has_key(f"sumgrad/grads/{name}"):
                data = (self.env.directory / "ranks" / name).read_bytes()
                self.store.set(f"sumgrad/grads/{name}", data)
        self.store.set(f"sumgrad/sent/{self.env.rank}", "1")

    def _gradient_files(self, rank: int) -> set[str]:
        """Names of the files that a rank's gradients are in."""
        result = (read_end_record(self.env.directory, rank) or {}).get("result") or {}
        return {name for name in result.get("grads", {}).values() if GRADS_FILE.fullmatch(name)}

    def _fetch(self, rank: int) -> bool:
        if not self._has_key(f"sumgrad/sent/{rank}"):
            return False
        try:
            for suffix in RECORD_SUFFIXES:
                key = f"sumgrad/file/{rank}/{suffix}"
                if self._has_key(key):
                    path = rank_file(self.env.directory, rank, suffix)
                    write_bytes(path, self.store.get(key))
            for name in sorted(self._gradient_files(rank)):
                path = self.env.directory / "ranks" / name
                if not path.exists():
                    write_bytes(path, self.store.get(f"sumgrad/grads/{name}"))
        except RuntimeError:
            return False
        return True


def _on_one_host() -> bool:
    """Whether torchrun started every rank here."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _run_exit_functions() -> None:
    """What was registered for the interpreter's exit; not while the main thread hangs."""
    if threading.current_thread() is threading.main_thread():
        atexit._run_exitfuncs()


def _runs(pid: int) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state not in ("Z", "X")
