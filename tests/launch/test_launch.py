"""The local launcher: one outcome for each rank, whatever the ranks do, and nobody left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sumgrad.launch.local import launcher as launcher_module
from sumgrad.launch.local.launcher import Launcher, RankJob

pytestmark = pytest.mark.distributed


# ---- what ranks do ------------------------------------------------------------------------------


def in_group(guard, *, name, arguments):
    """A job without pytest: one of the functions below, in the default group."""
    from sumgrad.launch.rank import local_group

    with local_group(guard):
        globals()[name](ranks=guard.env, **arguments)


def sum_once(ranks):
    import torch
    import torch.distributed as dist

    x = torch.full((3,), float(ranks.rank + 1))
    dist.all_reduce(x)
    return x.tolist()


def act(ranks, *, who, what, when):
    """Rank `who` does `what` before, between or after two collectives."""
    import torch
    import torch.distributed as dist

    def misbehave(now):
        if ranks.rank != who or now != when:
            return
        print(f"about to {what}", flush=True)
        if what == "raise":
            raise ValueError("seven is too many")
        if what == "exit0":
            os._exit(0)
        if what == "sys.exit":
            sys.exit(0)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "abort":
            os.abort()
        if what == "hang":
            time.sleep(1000)
        if what == "hang with the lock":
            sum(range(10**13))

    misbehave("before")
    x = torch.ones(4)
    dist.all_reduce(x)
    misbehave("between")
    dist.all_reduce(x)
    misbehave("after")
    return float(x[0])


def receive_nothing(ranks):
    """Both ranks wait for a message that nobody sends."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    dist.recv(torch.ones(7), src=1 - ranks.rank, tag=5)


def use_one_thread(ranks):
    import torch

    assert torch.get_num_threads() == 1


def leave_a_mark(ranks, *, directory):
    begun = Path(directory, f"{ranks.rank}.begun")
    begun.write_text(str(os.getpid()))
    begun.rename(begun.with_suffix(".pid"))  # whoever sees the file finds the number in it
    time.sleep(1000)


# ---- tests --------------------------------------------------------------------------------------


def test_results_and_outcomes(sumgrad_ranks):
    outcomes = sumgrad_ranks(sum_once, 4)
    assert [o.status for o in outcomes] == ["ok"] * 4
    assert [o.rank for o in outcomes] == [0, 1, 2, 3]
    assert all(o.exit_code == 0 and o.seconds is not None for o in outcomes)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_both_ways_to_start(sumgrad_launcher, tmp_path, start):
    job = RankJob(
        target=f"{__file__}:in_group",
        num_ranks=2,
        directory=tmp_path,
        arguments={"name": "sum_once", "arguments": {}},
        start=start,
    )
    assert [o.status for o in sumgrad_launcher.run(job)] == ["ok", "ok"]


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("raise", "raised", 1),
        ("sys.exit", "raised", 1),
        ("exit0", "missing", 0),
        ("kill", "killed", -9),
        ("abort", "killed", -6),
    ],
)
def test_a_rank_that_ends_early(sumgrad_ranks, what, status, code, when):
    outcomes = sumgrad_ranks(act, 3, who=1, what=what, when=when, timeout_s=20)
    bad = outcomes[1]
    assert (bad.status, bad.exit_code) == (status, code)
    assert f"about to {what}" in (bad.output or "")
    if what == "raise":
        assert "seven is too many" in bad.detail
        assert "misbehave" in bad.stack
    if what == "abort":
        assert "Fatal Python error: Aborted" in (bad.output or "")
    for other in (outcomes[0], outcomes[2]):
        if when == "after":
            assert other.ok
        else:
            assert other.status in ("raised", "timed_out")
            assert "allreduce" in other.waiting_in


@pytest.mark.parametrize(("what", "kills", "said"), [("kill", 1, True), ("kill", 0, False),
                                                    ("abort", 1, False)])  # fmt: skip
def test_a_rank_that_the_kernel_ended_for_want_of_memory(
    sumgrad_ranks, monkeypatch, what, kills, said
):
    counted = iter([5, 5 + kills])
    monkeypatch.setattr(launcher_module, "kills_for_want_of_memory", lambda: next(counted))
    bad = sumgrad_ranks(act, 2, who=1, what=what, when="before", timeout_s=20)[1]
    assert ("; this machine ran out of memory meanwhile" in bad.detail) == said


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_a_rank_that_hangs(sumgrad_ranks, when):
    started = time.monotonic()
    outcomes = sumgrad_ranks(act, 3, who=2, what="hang", when=when, timeout_s=3)
    assert time.monotonic() - started < 30
    assert outcomes[2].status == "timed_out"
    assert "misbehave" in outcomes[2].stack
    assert outcomes[2].waiting_in is None
    for other in outcomes[:2]:
        if when == "after":
            assert other.ok
        else:
            assert other.status in ("timed_out", "raised")
            assert "allreduce(SUM) of 4 float32" in other.waiting_in
            assert "test_launch.py" in other.waiting_in


def test_a_rank_that_hangs_with_the_interpreter_locked(sumgrad_ranks):
    outcomes = sumgrad_ranks(act, 2, who=0, what="hang with the lock", when="after", timeout_s=2)
    assert outcomes[0].status == "killed"
    assert "misbehave" in outcomes[0].stack
    assert outcomes[1].ok


def test_a_standstill_does_not_wait_for_the_deadline(sumgrad_ranks):
    started = time.monotonic()
    outcomes = sumgrad_ranks(receive_nothing, 2, timeout_s=300)
    assert time.monotonic() - started < 100
    assert all(o.status == "timed_out" and "stood still" in o.detail for o in outcomes)


def test_a_hang_inside_a_message(sumgrad_ranks):
    outcomes = sumgrad_ranks(receive_nothing, 2, timeout_s=3)
    for outcome in outcomes:
        assert outcome.status == "timed_out"
        assert f"recv of 7 float32 with rank {1 - outcome.rank}" in outcome.waiting_in
        assert "receive_nothing" in outcome.stack


def test_the_server_stays_single_threaded(sumgrad_launcher, sumgrad_ranks):
    sumgrad_ranks(sum_once, 2)
    sumgrad_launcher.wait_ready()
    assert sumgrad_launcher.threads == 1
    assert len(os.listdir(f"/proc/{sumgrad_launcher.pid}/task")) == 1


def test_ranks_use_one_thread(sumgrad_ranks):
    assert all(o.ok for o in sumgrad_ranks(use_one_thread, 2))


def collect_little(ranks):
    import gc

    assert gc.get_freeze_count() > 4 * len(gc.get_objects())


def test_what_the_server_imported_is_not_collected_again(sumgrad_ranks):
    """A rank's garbage collector looks at what the rank made itself."""
    outcomes = sumgrad_ranks(collect_little, 2)
    assert all(o.ok for o in outcomes), [o.detail for o in outcomes]


def test_what_is_read_when_it_is_used_replaces_no_server(monkeypatch):
    """As torch itself sets it in a process that imports Inductor."""
    before = launcher_module._read_on_import()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert launcher_module._read_on_import() == before
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    assert launcher_module._read_on_import() != before


def test_a_server_that_died_is_replaced(tmp_path):
    arguments = {"name": "use_one_thread", "arguments": {}}
    job = {"target": f"{__file__}:in_group", "num_ranks": 1, "arguments": arguments}
    with Launcher() as launcher:
        launcher.wait_ready()
        os.kill(launcher.pid, signal.SIGKILL)
        wait_until(lambda: not alive(launcher.pid))
        assert [o.status for o in launcher.run(RankJob(directory=tmp_path, **job))] == ["ok"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_nobody_is_left_behind(tmp_path, number):
    marks = tmp_path / "marks"
    marks.mkdir()
    code = f"""
from pathlib import Path
from sumgrad.launch.local.launcher import Launcher, RankJob
with Launcher() as launcher:
    launcher.run(RankJob(
        target={f"{__file__}:in_group"!r}, num_ranks=3,
        directory=Path({str(tmp_path)!r}),
        arguments={{"name": "leave_a_mark", "arguments": {{"directory": {str(marks)!r}}}}}))
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_until(lambda: len(list(marks.glob("*.pid"))) == 3)
    pids = [int(path.read_text()) for path in marks.glob("*.pid")]
    if number == signal.SIGINT:  # Ctrl-C reaches the whole foreground group
        os.killpg(parent.pid, number)
    else:
        parent.send_signal(number)
    parent.wait(timeout=120)
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_the_server_is_killed(tmp_path):
    with Launcher() as launcher:
        job = RankJob(
            target=f"{__file__}:in_group",
            num_ranks=2,
            directory=tmp_path,
            arguments={"name": "leave_a_mark", "arguments": {"directory": str(tmp_path)}},
        )
        launcher.submit(job)
        wait_until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
        os.kill(launcher.pid, signal.SIGKILL)
        outcomes = launcher.collect(job)
    assert [o.status for o in outcomes] == ["missing", "missing"]
    assert "fork server ended" in outcomes[0].detail
    wait_until(lambda: not any(alive(int(p.read_text())) for p in tmp_path.glob("*.pid")))


def wait_until(condition, *, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def which_triton(guard) -> None:
    from sumgrad.kernels.runtime import INTERPRETED

    assert INTERPRETED


def test_ranks_interpret_triton_whoever_starts_them(tmp_path):
    """A script that never heard of TRITON_INTERPRET, and imported triton before the launcher."""
    code = (
        "import torch._dynamo; from pathlib import Path\n"
        "from sumgrad.launch.local.launcher import Launcher, RankJob\n"
        f"place = Path({str(tmp_path)!r}); (place / 'ranks').mkdir()\n"
        "job = RankJob(target='test_launch:which_triton', num_ranks=1, directory=place)\n"
        "with Launcher() as launcher:\n"
        "    (outcome,) = launcher.run(job)\n"
        "assert outcome.ok, outcome\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env
    )
    assert found.returncode == 0, found.stderr
