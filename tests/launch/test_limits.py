"""Few open files: what is missing is said, nothing is left, and what may be asked for is."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import ROOT
from sumgrad.base import limits

resource = pytest.importorskip("resource")


def limited(soft: int, hard: int, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )


def test_ten_ranks_and_thirty_files(tmp_path):
    out = tmp_path / "run"
    done = limited(30, 30, "-m", "sumgrad", "run", "three_pool", "--out", str(out))
    assert done.returncode == 3, done.stderr
    assert "each of 10 ranks needs about 50 open files, and the hard limit is 30" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert json.loads((out / "verdict.json").read_text())["status"] == "unknown"


def test_a_soft_limit_is_raised(tmp_path):
    asked = (
        "from sumgrad.base import limits; import resource; limits.allow_open_files(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert limited(64, 900, "-c", asked).stdout.split() == ["900", "900"]
    assert limited(64, 64, "-c", asked).stdout.split() == ["64", "64"]


@pytest.mark.parametrize(
    ("ranks", "hard", "enough"),
    [(10, 50, True), (10, 49, False), (56, 142, True), (56, 141, False)],
)
def test_what_ranks_need(ranks, hard, enough, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    assert (limits.too_few_files(ranks) is None) == enough


def test_no_limit_is_enough(monkeypatch):
    endless = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _: (endless, endless))
    assert limits.too_few_files(100_000) is None
