"""What ranks start, print and leave behind: ended, bounded, removed; and every end is judged."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, shipped
from sumgrad.base.outcome import RankOutcome
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check
from sumgrad.launch.judging import judge_directory
from sumgrad.launch.local.conversation import Conversation
from sumgrad.launch.local.launcher import Launcher, RankJob
from sumgrad.launch.local.rank_log import RankLog

pytestmark = pytest.mark.distributed


def on_ranks(launcher, directory, function, **more):
    """Run a function of this file on ranks, with its arguments."""
    return launcher.run(job_of(directory, function, **more))


def job_of(directory, function, *, num_ranks=1, timeout_s=30.0, **arguments):
    return RankJob(
        target=f"{__file__}:in_group",
        num_ranks=num_ranks,
        directory=directory,
        arguments={"name": function.__name__, "arguments": arguments},
        timeout_s=timeout_s,
    )


def in_group(guard, *, name, arguments):
    """One of the functions below on a rank, in the default group."""
    from sumgrad.launch.rank import local_group

    with local_group(guard):
        globals()[name](ranks=guard.env, **arguments)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def wait_until(condition, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


# ---- what ranks start ---------------------------------------------------------------------------


def start_others(ranks, *, marks, hows):
    """Leave a process behind that would run for ever, however well it hides."""
    how = hows[ranks.rank]
    marks = f"{marks}/{how}"
    os.mkdir(marks)
    code = f"import os, time; open({marks!r} + f'/{{os.getpid()}}', 'w'); time.sleep(1000)"
    if how == "fork":
        if not os.fork():
            open(f"{marks}/{os.getpid()}", "w").close()
            time.sleep(1000)
    elif how == "daemon":  # two parents gone, a session of its own, no signal but one
        if not os.fork():
            os.setsid()
            if os.fork():
                os._exit(0)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.execve(sys.executable, [sys.executable, "-S", "-c", code], {})
    else:
        subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=how == "session")
    wait_until(lambda: os.listdir(marks))


def test_what_a_step_starts_ends_with_the_run(sumgrad_launcher, tmp_path):
    hows = ["fork", "child", "session", "daemon"]
    (tmp_path / "marks").mkdir()
    arguments = {"marks": str(tmp_path / "marks"), "hows": hows}
    outcomes = on_ranks(sumgrad_launcher, tmp_path, start_others, num_ranks=4, **arguments)
    assert [o.status for o in outcomes] == ["ok"] * 4
    for how in hows:
        (mark,) = (tmp_path / "marks" / how).iterdir()
        assert not alive(int(mark.name)), how  # with the job, not some time later


def do_to_the_server(ranks, *, marks, number):
    start_others(ranks, marks=marks, hows=["session"])
    os.kill(os.getppid(), number)
    time.sleep(1000)


def test_a_server_that_is_killed_or_stopped_is_missed(tmp_path, monkeypatch):
    """And what its ranks had started is ended by the launcher."""
    monkeypatch.setattr("sumgrad.launch.local.launcher.SILENCE_S", 2.0)
    with Launcher() as launcher, launcher.temporary_directory() as kept:
        for number, words in (
            (signal.SIGKILL, "the fork server ended with exit code -9"),
            (signal.SIGSTOP, "the fork server was silent for 2 s"),
            (signal.SIGTERM, "the fork server ended with exit code 143"),
        ):
            marks = tmp_path / number.name
            marks.mkdir()
            arguments = {"marks": str(marks), "number": int(number)}
            place = tmp_path / f"run{number}"
            (outcome,) = on_ranks(launcher, place, do_to_the_server, **arguments)
            assert outcome.status == "missing"
            assert outcome.detail == words
            (mark,) = (marks / "session").iterdir()
            wait_until(lambda mark=mark: not alive(int(mark.name)))
            assert kept.exists()  # whatever became of a server
    assert not kept.parent.exists()


def terminate_a_child(guard):
    """A forked child that is ended is no business of the rank's; nor is one that comes back."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM
    if not (pid := os.fork()):
        sys.exit("this ends in the launcher's own code, as a rank's end would")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
    assert not guard.env.file(".json").exists()
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(0.1)


def test_signals_of_a_steps_own_do_not_stop_its_rank(sumgrad_launcher, tmp_path):
    target = f"{__file__}:terminate_a_child"
    (outcome,) = sumgrad_launcher.run(RankJob(target=target, num_ranks=1, directory=tmp_path))
    assert outcome.ok, outcome


def load_data(ranks, *, marks):
    import torch

    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(
        data, batch_size=2, num_workers=2, persistent_workers=True,
        worker_init_fn=lambda _: Path(marks, str(os.getpid())).touch(),
    )  # fmt: skip
    total = sum(float(rows.sum()) for (rows,) in loader)
    assert total == 28.0
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_of_a_data_loader(sumgrad_launcher, tmp_path):
    """They work, and end with the run, also those of a rank that could not end them."""
    marks = tmp_path / "marks"
    marks.mkdir()
    ended = on_ranks(sumgrad_launcher, tmp_path, load_data, num_ranks=2, marks=str(marks))
    assert [o.status for o in ended] == ["ok", "killed"]
    pids = [int(mark.name) for mark in marks.iterdir()]
    assert len(pids) == 4
    assert not any(alive(pid) for pid in pids)


# ---- how ranks end ------------------------------------------------------------------------------


def end_late(ranks):
    """End badly after everything was written: at the exit, as a destructor would."""
    how = list(LATE_ENDS)[ranks.rank]
    if how == "segfault":
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    elif how == "kill":
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    elif how == "code":
        atexit.register(os._exit, 3)
    elif how == "hang":
        atexit.register(time.sleep, 1000)
    elif how == "told":  # to end, while it writes its last
        import sumgrad.launch.guard

        write = sumgrad.launch.guard.write_json

        def write_later(path, data):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            write(path, data)

        sumgrad.launch.guard.write_json = write_later


LATE_ENDS = {
    "segfault": ("killed", "killed by SIGSEGV"),
    "kill": ("killed", "killed by SIGKILL"),
    "code": ("raised", "exited with code 3 after it had finished"),
    "hang": ("raised", "exited with code 124 after it had finished"),
    "told": ("raised", "exited with code 124 after it had finished"),
    "well": ("ok", None),
}


def test_a_rank_that_ends_badly_after_its_last_write(sumgrad_launcher, tmp_path):
    outcomes = on_ranks(sumgrad_launcher, tmp_path, end_late, num_ranks=len(LATE_ENDS))
    for record in (tmp_path / "ranks").glob("rank_?????.json"):
        assert json.loads(record.read_text())["status"] == "ok"
    assert [(o.status, o.detail) for o in outcomes] == list(LATE_ENDS.values())


LATE = """
import atexit, os, signal
from sumgrad.launch.rank import check_rank
from sumgrad.workloads.three_pool.workload import ThreePool

class Late(ThreePool):
    def formulas(self, dtype, device, **more):
        import torch.distributed as dist
        who = dist.get_rank() if dist.is_initialized() else "helper"
        if who == {who!r}:
            atexit.register(os.kill, os.getpid(), signal.{signal})
        return super().formulas(dtype, device, **more)
"""


def run_late(launcher, tmp_path, who, number="SIGKILL"):
    file = tmp_path / "late.py"
    file.write_text(LATE.format(who=who, signal=number))
    options = CheckOptions(
        topology=shipped("three_pool_ones"), workload=f"{file}:Late", out=tmp_path / "out",
        tiers=("structure",), timeout_s=20,
    )  # fmt: skip
    return run_check(options, launcher=launcher)


@pytest.mark.parametrize("who", [2, "helper"])
def test_a_verdict_says_who_ended_badly(sumgrad_launcher, tmp_path, who):
    verdict, directory = run_late(sumgrad_launcher, tmp_path, who)
    assert verdict.status == "unknown"
    (reason,) = [r for r in verdict.reasons if "killed by SIGKILL" in r]
    assert ("reference of tier structure" in reason) == (who == "helper")
    again = judge_directory(directory)
    assert again.status == "unknown"
    assert reason in again.reasons


def test_torchrun_says_who_ended_badly(tmp_path):
    file, out = tmp_path / "late.py", tmp_path / "out"
    file.write_text(LATE.format(who=2, signal="SIGSEGV"))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        str(ROOT / "harness" / "run.py"), "--topology", str(shipped("three_pool_ones")), "--out",
        str(out), "--tiers", "structure", "--workload", f"{file}:Late", "--timeout", "30",
    ]  # fmt: skip
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode != 0
    assert "sumgrad: UNKNOWN (exit 3)" in process.stdout
    verdict = json.loads((out / "verdict.json").read_text())
    assert verdict["status"] == "unknown"
    assert [o["status"] for o in verdict["outcomes"]] == ["ok", "ok", "killed", "ok"]


def test_a_rank_killed_from_outside_is_no_fault_that_was_caught():
    base = {"rank": 0, "pool": "ci", "status": "killed"}
    gone = {**base, "status": "missing"}
    assert RankOutcome(**base, exit_code=-9).ended_from_outside
    assert RankOutcome(**base, exit_code=124).ended_from_outside  # by SIGTERM, as it wrote itself
    assert RankOutcome(**gone).ended_from_outside  # the server was lost
    assert not RankOutcome(**gone, exit_code=0).ended_from_outside
    assert not RankOutcome(**base, exit_code=-9, by_launcher=True).ended_from_outside
    assert not RankOutcome(**base, exit_code=-11).ended_from_outside
    assert not RankOutcome(**{**base, "status": "raised"}, exit_code=1).ended_from_outside


# ---- what ranks print ---------------------------------------------------------------------------


def print_a_lot(ranks, *, num_bytes):
    line = "x" * 1023 + "\n"
    for _ in range(num_bytes // 1024):
        sys.stdout.write(line)
    print("the last words", flush=True)
    raise ValueError("too much")


def test_what_a_rank_prints_is_bounded(sumgrad_launcher, tmp_path):
    outcomes = on_ranks(sumgrad_launcher, tmp_path, print_a_lot, num_bytes=64 << 20, num_ranks=2)
    for outcome in outcomes:
        assert outcome.status == "raised"
        assert "the last words" in outcome.output
    for log in (tmp_path / "ranks").glob("*.log"):
        text = log.read_bytes()
        assert len(text) < (2 << 20) + 100
        assert text.startswith(b"x" * 1023)
        assert b"bytes of output left out here" in text
        assert text.rstrip().endswith(b"ValueError: too much")


@pytest.mark.parametrize("sizes", [(3,), (10,), (14,), (15,), (4, 40), (40, 3), (9, 9, 9)])
def test_a_log_keeps_its_beginning_and_its_end(tmp_path, sizes):
    log = RankLog(tmp_path / "log", head_bytes=10, tail_bytes=4)
    printed = bytes(ord("a") + i % 26 for i in range(sum(sizes)))
    at = 0
    for size in sizes:
        os.write(log.writer, printed[at : at + size])
        log.drain()
        at += size
    os.close(log.writer)
    log.close()
    text = (tmp_path / "log").read_bytes()
    if len(printed) <= 14:
        assert text == printed
    else:
        words = f"\n[sumgrad: {len(printed) - 14} bytes of output left out here]\n".encode()
        assert text == printed[:10] + words + printed[-4:]


def print_for_ever(ranks):
    while True:
        os.write(1, b"y" * 65536)


def test_a_rank_that_prints_for_ever_is_stopped_in_time(sumgrad_launcher, tmp_path):
    (outcome,) = on_ranks(sumgrad_launcher, tmp_path, print_for_ever, timeout_s=10)
    assert outcome.status == "timed_out"
    assert "print_for_ever" in outcome.stack


def stop_one(ranks):
    import torch
    import torch.distributed as dist

    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(2))


def test_a_rank_that_is_stopped_is_called_that_long_before_the_deadline(sumgrad_launcher, tmp_path):
    started = time.monotonic()
    first, second = on_ranks(sumgrad_launcher, tmp_path, stop_one, num_ranks=2, timeout_s=300)
    assert time.monotonic() - started < 100
    assert (first.status, second.status) == ("timed_out", "killed")
    assert second.detail.startswith("its process was stopped")
    assert "allreduce" in first.waiting_in


# ---- the conversation ---------------------------------------------------------------------------


def test_a_conversation_drops_what_was_cut_off():
    import socket

    ours, theirs = socket.socketpair()
    left, right = Conversation(ours), Conversation(theirs)
    ours.sendall(b'{"id": 1, "rank')  # and the sender was interrupted
    left.send({"id": 2})
    ours.sendall(b'[1]\nnull\n\xff\n{"id"')
    left.send({"id": 3})
    assert [right.receive(0), right.receive(0), right.receive(0)] == [{"id": 2}, {"id": 3}, None]
    left.close()
    with pytest.raises(EOFError):
        right.receive(None)


def mark_and_wait(ranks, *, marks):
    Path(marks, str(os.getpid())).touch()
    time.sleep(1000)


def say(ranks):
    return None


class Expired(BaseException):
    """What a time limit raises."""


@pytest.fixture
def alarm():
    """`alarm(seconds)`: raise Expired in the main thread, as pytest-timeout's signals do."""

    def expire(*_: object) -> None:
        raise Expired

    before = signal.signal(signal.SIGALRM, expire)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_launcher_survives_what_is_raised_while_it_waits(tmp_path, alarm):
    """While the server imports, while ranks run, and where nobody collected a job."""
    marks = {"marks": str(tmp_path / "marks")}
    Path(marks["marks"]).mkdir()
    two = {"num_ranks": 2, **marks}

    def pids() -> list[int]:
        return [int(mark.name) for mark in Path(marks["marks"]).iterdir()]

    with Launcher() as launcher:
        alarm(0.2)
        with pytest.raises(Expired):
            on_ranks(launcher, tmp_path / "importing", mark_and_wait, **two)
        launcher.wait_ready()
        alarm(1.0)
        with pytest.raises(Expired):
            on_ranks(launcher, tmp_path / "collecting", mark_and_wait, **two)
        assert not any(alive(pid) for pid in pids())
        launcher.submit(job_of(tmp_path / "at once", mark_and_wait, **two))
        first = launcher.pid
        launcher.submit(job_of(tmp_path / "forgotten", mark_and_wait, **two))
        wait_until(lambda: any(alive(pid) for pid in pids()))
        for again in ("second", "third"):
            outcomes = on_ranks(launcher, tmp_path / again, say, num_ranks=2)
            assert [o.status for o in outcomes] == ["ok", "ok"]
            assert not any(alive(pid) for pid in pids())
        assert launcher.pid == first


def test_a_launcher_survives_an_interruption_at_any_line(tmp_path):
    """Raised at many places of a run, from the first line of `submit` to the last of `collect`."""
    import sumgrad.launch.local.conversation
    import sumgrad.launch.local.launcher

    files = {sumgrad.launch.local.launcher.__file__, sumgrad.launch.local.conversation.__file__}
    with Launcher() as launcher:
        launcher.wait_ready()
        for stop_at in [*range(1, 60, 4), *range(60, 400, 60)]:
            lines = 0

            def trace(frame, event, _, *, stop_at=stop_at):
                nonlocal lines
                if frame.f_code.co_filename not in files:
                    return None
                if event == "line":
                    lines += 1
                    if lines == stop_at:
                        sys.settrace(None)
                        raise Expired
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                on_ranks(launcher, tmp_path / f"{stop_at}", say, num_ranks=1)
            except Expired:
                pass
            finally:
                sys.settrace(before)
        outcomes = on_ranks(launcher, tmp_path / "last", say, num_ranks=2)
        assert [o.status for o in outcomes] == ["ok", "ok"]
