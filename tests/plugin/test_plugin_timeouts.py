"""A test that pytest-timeout ends, by either of its methods: the next test on ranks works."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
pytest.importorskip("pytest_timeout")
SLOW = """
    import os, time
    from pathlib import Path
    import pytest, torch
    import torch.distributed as dist

    MARKS = Path({marks!r})

    @pytest.mark.distributed(ranks=2)
    def test_before(ranks):
        dist.barrier()

    @pytest.mark.timeout(2)
    @pytest.mark.distributed(ranks=2)
    def test_slow(ranks):
        (MARKS / str(os.getpid())).touch()
        time.sleep(1000)

    @pytest.mark.distributed(ranks=2)
    @pytest.mark.parametrize("value", [1.0, 2.0])
    def test_after(ranks, value):
        x = torch.full((2,), value)
        dist.all_reduce(x)
        assert x.tolist() == [2 * value, 2 * value]
"""


def living(marks: Path) -> list[str]:
    """The marked processes that are not dead."""
    found = []
    for mark in marks.iterdir():
        try:
            state = Path(f"/proc/{mark.name}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        found += [mark.name] if state not in ("Z", "X") else []
    return found


@pytest.fixture
def slow(pytester, tmp_path, monkeypatch) -> Path:
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("tmp")))
    pytester.makepyfile(SLOW.format(marks=str(marks)))
    return marks


def test_the_signal_method_beside_xdist(pytester, slow):
    flags = ("-o", "timeout_method=signal", "-n", "1")
    result = pytester.runpytest_subprocess(*flags, timeout=120)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*Timeout (>2.0s) from pytest-timeout*"])
    assert len(list(slow.iterdir())) == 2
    assert not living(slow)


def test_the_thread_method_leaves_nobody(pytester, slow):
    """It ends the whole process where it stands; ranks, server and their files end with it."""
    result = pytester.runpytest_subprocess("-o", "timeout_method=thread", timeout=120)
    assert result.ret != 0
    deadline = time.monotonic() + 20
    while living(slow) or [n for n in os.listdir(os.environ["TMPDIR"]) if len(n) == 40]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(list(slow.iterdir())) == 2
