"""Stored runs: listed by age, removed but for the latest, and nothing else is touched."""

from __future__ import annotations

import json
import os

import pytest
from sumgrad.cli.main import main
from sumgrad.launch.ask import new_directory


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Three runs, the second without a verdict; a folder that is no run, and a baseline."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / ".sumgrad" / "runs"
    for i, status in enumerate(("pass", None, "fail")):
        run = runs / f"r{i}"
        run.mkdir(parents=True)
        (run / "run.json").write_text("{}")
        os.utime(run / "run.json", (1000 + i, 1000 + i))
        if status:
            data = {"status": status, "workload": "w", "topology": {"name": f"t{i}"}}
            (run / "verdict.json").write_text(json.dumps(data))
    (runs / "other").mkdir()
    (runs / "latest").symlink_to("r2")
    (tmp_path / ".sumgrad" / "baselines" / "b").mkdir(parents=True)
    return runs


def listed(capsys, *words):
    assert main(["list", "runs", *words, "--json", "-", "--quiet"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_latest_comes_first(place, capsys):
    found = listed(capsys)["runs"]
    assert [(r["directory"][-2:], r["status"]) for r in found] == [
        ("r2", "fail"), ("r1", None), ("r0", "pass"),
    ]  # fmt: skip
    assert main(["list", "runs"]) == 0
    text = capsys.readouterr().out
    assert "w on t2" in text
    assert "NO VERDICT" in text


def test_all_but_the_latest_are_removed(place, capsys):
    data = listed(capsys, "--keep", "1")
    assert [r["directory"][-2:] for r in data["removed"]] == ["r1", "r0"]
    assert sorted(p.name for p in place.iterdir()) == ["latest", "other", "r2"]
    assert (place.parent / "baselines" / "b").is_dir()
    assert listed(capsys, "--keep", "5")["removed"] == []


def test_nothing_stored_and_bad_usage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["list", "runs"]) == 0
    assert "no stored runs here" in capsys.readouterr().out
    assert main(["list", "--keep", "3"]) == 2
    assert main(["list", "runs", "--keep", "0"]) == 2


def test_a_new_run_is_the_latest_and_no_commits_business(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = new_directory(None, "a"), new_directory(None, "b")
    assert (tmp_path / ".sumgrad" / "runs" / "latest").resolve() == second.resolve()
    assert (tmp_path / ".sumgrad" / ".gitignore").read_text() == "*\n"
    assert first.is_dir()
    new_directory(tmp_path / "own", "c")
    assert (tmp_path / ".sumgrad" / "runs" / "latest").resolve() == second.resolve()
