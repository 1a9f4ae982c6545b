"""What needs most memory runs in one process at a time."""

from __future__ import annotations

import subprocess
import sys
import time

from sumgrad.base.memory import available_memory, one_at_a_time

HOLD = """
import sys, time
from sumgrad.base.memory import one_at_a_time
with one_at_a_time(file=sys.argv[2]):
    print("held", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def hold(seconds, file):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(seconds), str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_it_waits_for_another_process_and_no_longer_than_its_patience(tmp_path):
    file = tmp_path / "any"
    file.touch()
    other = hold(100, file)
    started = time.monotonic()
    with one_at_a_time(patience_s=1.0, file=str(file)):
        assert time.monotonic() - started >= 1.0
    other.kill()  # whoever dies holds it no more
    other.wait()
    started = time.monotonic()
    with one_at_a_time(patience_s=60, file=str(file)):
        assert time.monotonic() - started < 30
    with one_at_a_time(patience_s=60, file=str(file)):
        pass  # given back
    with one_at_a_time(file=str(tmp_path / "missing")):
        pass


def test_there_is_some_memory():
    told = available_memory()
    assert told is None or told > 1 << 20
