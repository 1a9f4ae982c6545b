"""`sumgrad init`: what it writes runs as it stands, under any name, and writes over nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from sumgrad.cli.main import main
from sumgrad.launch.ask import CheckOptions
from sumgrad.launch.check import run_check


@pytest.mark.distributed
def test_the_step_passes_and_its_test_too(tmp_path, monkeypatch, sumgrad_launcher):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "checks", "--name", "pre_train2"]) == 0
    names = ["pre_train2.py", "pre_train2.yaml", "test_pre_train2.py"]
    assert sorted(path.name for path in (tmp_path / "checks").iterdir()) == names
    assert "class PreTrain2:" in (tmp_path / "checks" / "pre_train2.py").read_text()
    options = CheckOptions(topology=tmp_path / "checks" / "pre_train2.yaml", out=tmp_path / "run")
    verdict, _ = run_check(options, launcher=sumgrad_launcher)
    assert verdict.status == "pass", verdict.data
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path / "checks", capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert "test_every_gradient_is_right" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_nothing_is_written_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_step.yaml").write_text("mine\n")
    assert main(["init"]) == 2
    assert "my_step.yaml is there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["my_step.yaml"]


@pytest.mark.parametrize("name", ["Step", "a-b", "../a", "", "1a"])
def test_a_name_that_is_no_file_of_python_is_refused(tmp_path, name, capsys):
    assert main(["init", str(tmp_path), "--name", name]) == 2
    assert "expected the name of a Python file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
