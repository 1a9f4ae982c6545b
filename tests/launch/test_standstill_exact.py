"""When ranks will never go on: told early where it is sure, and never of one that works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from sumgrad.launch.local import processes
from sumgrad.launch.local.standstill import ASLEEP_S, STOPPED_S, Standstill, activity
from sumgrad.record.endings import rank_file

WORKS = "while True: pass"
SLEEPS = "import time; time.sleep(1000)"
CHILD_WORKS = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORKS!r}])"


@dataclass
class Rank:
    rank: int
    pid: int
    exit_code: int | None = None


@pytest.fixture
def start():
    running = []

    def one(code):
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        running.append(process)
        return process.pid

    yield one
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def issue(directory, rank, *, done=False, op="allreduce"):
    event = {"n": 1, "label": "s", "op": op, "group": [0, 1], "dtype": "float32", "numel": 4,
             "site": "a.py:1", "reduce": "SUM", "peer": None}  # fmt: skip
    lines = [event] + ([{"done": 1}] if done else [])
    path = rank_file(directory, rank, ".ledger.jsonl")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def is_final(directory, pids, *, seconds, looks=6):
    """Whether it is ever told within so many seconds, each look at a later time."""
    still = Standstill(lambda rank: (directory, rank))
    ranks = [Rank(i, pid) for i, pid in enumerate(pids)]
    found = []
    for look in range(looks):
        found.append(still.is_final(ranks, 100 + seconds * look / (looks - 1)))
        time.sleep(0.15)
    return any(found)


def test_one_waits_and_the_other_sleeps(tmp_path, start):
    issue(tmp_path, 0)
    pids = [start(SLEEPS), start(SLEEPS)]
    time.sleep(1)  # until they sleep
    assert not is_final(tmp_path, pids, seconds=ASLEEP_S - 5)
    assert is_final(tmp_path, pids, seconds=ASLEEP_S + 5)


@pytest.mark.parametrize("code", [WORKS, CHILD_WORKS])
def test_one_that_works_is_waited_for(tmp_path, start, code):
    issue(tmp_path, 0)
    pids = [start(SLEEPS), start(code)]
    time.sleep(1)
    assert not is_final(tmp_path, pids, seconds=1000)


def test_a_stopped_one_is_told_sooner(tmp_path, start):
    issue(tmp_path, 0)
    pids = [start(SLEEPS), start(WORKS)]
    time.sleep(1)
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(0.2)
    assert "T" in activity(pids[1])[0]
    assert not is_final(tmp_path, pids, seconds=STOPPED_S - 1)
    assert is_final(tmp_path, pids, seconds=STOPPED_S + 2)


def test_nobody_who_stands_in_an_operation_is_no_standstill(tmp_path, start):
    issue(tmp_path, 0, done=True)
    pids = [start(SLEEPS), start(SLEEPS)]  # both load their data, say
    time.sleep(1)
    assert not is_final(tmp_path, pids, seconds=1000)


def test_a_ledger_that_grows_is_no_standstill(tmp_path, start):
    pids = [start(SLEEPS), start(SLEEPS)]
    time.sleep(1)
    still = Standstill(lambda rank: (tmp_path, rank))
    ranks = [Rank(i, pid) for i, pid in enumerate(pids)]
    for look in range(5):
        issue(tmp_path, 0, op="allreduce" + "x" * look)
        assert not still.is_final(ranks, 100 + 40 * look)


def test_all_in_an_operation(tmp_path, start):
    pids = [start(SLEEPS), start(SLEEPS)]
    issue(tmp_path, 0)
    issue(tmp_path, 1)
    assert is_final(tmp_path, pids, seconds=21)


def test_where_the_kernel_keeps_no_account_nobody_is_asleep(tmp_path, start, monkeypatch):
    issue(tmp_path, 0)
    pids = [start(SLEEPS), start(SLEEPS)]
    time.sleep(1)
    read = processes._read
    monkeypatch.setattr(
        processes, "_read", lambda file: "0 0 0" if file.name == "schedstat" else read(file)
    )
    assert not is_final(tmp_path, pids, seconds=1000)


def test_a_process_that_is_gone_counts_as_busy():
    assert activity(2**22 + 7)[0] - {"S", "T"}
