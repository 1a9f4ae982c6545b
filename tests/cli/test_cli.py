"""The command line: exit codes, clear errors, stored runs, renderings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import RUNNABLE, shipped
from sumgrad.base.verdict import merge
from sumgrad.cli.main import main


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def test_merging_takes_the_worst_and_nothing_is_unknown():
    assert merge([]) == "unknown"
    assert merge(["pass", "pass"]) == "pass"
    assert merge(["pass", "unknown"]) == "unknown"
    assert merge(["fail", "unknown", "pass"]) == "fail"


def test_help_and_version(capsys):
    assert run("--help") == 0
    assert "exit codes" in capsys.readouterr().out
    assert run("--version") == 0
    for verb in ("run", "plan", "faults", "judge", "report", "list"):
        assert run(verb, "--help") == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: VERB"),
        (["fly"], "invalid choice"),
        (["run"], "T.yaml"),
        (["run", "absent.yaml"], "absent.yaml: no such file"),
        (["run", "T", "--dtype", "int8"], "--dtype"),
        (["run", "T", "--tiers", "all"], "expected some of structure, precision, bitwise"),
        (["run", "T", "--tiers", "bitwise", "--dtype", "float16"], "sums are float32 or float64"),
        (["run", "T", "--steps", "0"], "expected an integer from 1"),
        (["run", "T", "--timeout", "-1"], "expected seconds"),
        (["run", "T", "--fault", "bad_luck"], "got 'bad_luck', expected one of"),
        (["run", "T", "--workload", "x"], "got 'x', expected one of "),
        (["plan", "T", "--fault", "bad_luck"], "expected one of"),
        (["judge", "absent"], "no run.json"),
        (["report", "absent"], "no run.json"),
    ],
)
def test_bad_usage_is_exit_2_with_the_reason(argv, words, capsys):
    argv = [shipped("three_pool_ones") if arg == "T" else arg for arg in argv]
    assert run(*argv) == 2
    assert words in capsys.readouterr().err


def test_places_for_results_are_looked_at_first(tmp_path, capsys):
    target = tmp_path / "absent" / "v.json"
    assert run("run", shipped("three_pool_ones"), "--json", target) == 2
    assert "--json" in capsys.readouterr().err
    assert run("list", "--json", tmp_path) == 2


def test_plan_only_topologies_are_not_started(capsys):
    assert run("run", shipped("three_pool_planet")) == 2
    assert "sumgrad plan" in capsys.readouterr().err


def test_run_py_without_torchrun_says_what_to_type(monkeypatch, capsys):
    from sumgrad.cli.main import torchrun_main

    monkeypatch.setattr("sys.argv", ["run.py", "--topology", str(shipped("three_pool"))])
    monkeypatch.delenv("RANK", raising=False)
    assert torchrun_main() == 2
    errors = capsys.readouterr().err
    assert "torchrun --standalone --nproc-per-node 10" in errors
    assert "sumgrad run" in errors


@pytest.mark.parametrize("name", RUNNABLE)
def test_plan(name, capsys, tmp_path):
    assert run("plan", shipped(name), "--json", tmp_path / "plan.json") == 0
    out = capsys.readouterr().out
    assert "PROVED" in out
    assert "every one of" in out
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["holds"]
    assert data["edges"]


def test_a_program_has_no_plan(capsys):
    assert run("plan", shipped("ddp")) == 2
    assert "has no plan; use `sumgrad run" in capsys.readouterr().err


def test_plan_with_a_fault(capsys):
    assert run("plan", shipped("three_pool"), "--fault", "avg_on_ci") == 1
    out = capsys.readouterr().out
    assert "REFUTED" in out
    assert "1/4" in out
    assert "AVG" in out


def test_list(capsys, tmp_path):
    assert run("list", "--json", tmp_path / "list.json") == 0
    out = capsys.readouterr().out
    assert "three_pool_planet" in out
    assert "stale_buffer" in out
    assert set(json.loads((tmp_path / "list.json").read_text())) >= {"workloads", "topologies"}


@pytest.fixture
def stored(run_once, tmp_path) -> Path:
    """A stored failing run that a test may change."""
    _, directory = run_once("three_pool", fault="avg_on_ci", tiers=("structure",))
    return Path(shutil.copytree(directory, tmp_path / "run"))


@pytest.mark.distributed
def test_judge_and_report(stored, tmp_path, capsys):
    assert run("judge", stored, "--json", tmp_path / "v.json") == 1
    out = capsys.readouterr().out
    assert "averages (AVG)" in out
    assert out.splitlines()[-1].startswith("sumgrad: FAIL (exit 1)")
    theirs = json.loads((stored / "verdict.json").read_text())
    again = json.loads((tmp_path / "v.json").read_text())
    assert again["diagnoses"] == theirs["diagnoses"]
    files = {kind: tmp_path / f"r.{kind}" for kind in ("html", "markdown", "junit", "sarif")}
    flags = [x for kind, path in files.items() for x in (f"--{kind}", path)]
    assert run("report", stored, "--quiet", *flags) == 1
    for path in files.values():
        assert "averages (AVG)" in path.read_text()
    import xml.etree.ElementTree as tree

    suite = tree.fromstring(files["junit"].read_text())
    assert int(suite.attrib["failures"]) == len(suite.findall(".//failure")) == 2


@pytest.mark.distributed
def test_the_verdict_has_the_promised_shape(stored):
    data = json.loads((stored / "verdict.json").read_text())
    assert data["schema"] == 1
    wanted = {"status", "topology", "workload", "fault", "seed", "tiers", "tensors",
              "coefficients", "diagnoses", "outcomes", "reproduce", "versions"}  # fmt: skip
    assert wanted <= set(data)
    assert {"name", "rank", "tier", "status", "max_abs", "max_rel", "ratio", "noise_floor",
            "threshold", "smallest_scale_error_caught",
            "index"} <= set(data["tensors"][0])  # fmt: skip
    assert {"params", "term", "producer", "rows", "expected", "recovered", "sigma", "fraction",
            "identifiable"} <= set(data["coefficients"][0])  # fmt: skip
    assert {"cause", "term", "ranks", "factor", "symbol", "also", "because"} <= set(
        data["diagnoses"][0]
    )
    assert {"rank", "pool", "status", "exit_code", "seconds", "detail"} <= set(data["outcomes"][0])


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("file", "damage", "code"),
    [
        ("run.json", Path.unlink, 2),
        ("run.json", truncate, 2),
        ("run.json", lambda p: p.write_text('{"schema": 99}'), 2),
        ("run.json", lambda p: p.write_text('{"schema": 2}'), 2),
        ("run.json", lambda p: p.write_text("[]"), 2),
        ("run.json", lambda p: p.write_text(p.read_text().replace('"float64"', '"float99"')), 2),
        ("run.json", lambda p: p.write_text(p.read_text().replace('"enforce"', '"maybe"')), 2),
        (
            "run.json",
            lambda p: p.write_text(p.read_text().replace('"steps": 1', '"steps": "x"')),
            2,
        ),
        ("outcomes.json", truncate, 1),
        ("outcomes.json", Path.unlink, 1),
        ("reference_structure_0.safetensors", truncate, 1),
        ("reference_structure_0.json", truncate, 1),
        ("reference_structure_0.safetensors", Path.unlink, 1),
        ("partials_structure_0.safetensors", Path.unlink, 1),
        ("partials_structure_0.safetensors", truncate, 1),
        ("ranks/grads_*.safetensors", truncate, 1),
        ("ranks/grads_*.safetensors", Path.unlink, 1),
        ("ranks/rank_00002.safetensors", Path.unlink, 1),
        ("ranks/rank_00007.json", Path.unlink, 1),
        ("ranks/rank_00007.ledger.jsonl", truncate, 1),
        ("ranks/rank_00007.ledger.jsonl", Path.unlink, 1),
    ],
)
def test_damaged_runs_never_pass(stored, file, damage, code, capsys):
    damage(min(stored.glob(file)))
    assert run("judge", stored, "--quiet") == code, capsys.readouterr()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("ranks/grads_*.safetensors", truncate),
        ("ranks/grads_*.safetensors", Path.unlink),
        ("ranks/rank_00003.json", Path.unlink),
        ("ranks/rank_00003.json", lambda p: p.write_text("{}")),
        ("ranks/rank_00003.ledger.jsonl", Path.unlink),
        ("ranks/rank_00003.ledger.jsonl", truncate),
        ("reference_structure_0.safetensors", truncate),
        ("reference_precision_0.json", Path.unlink),
    ],
)
def test_damaged_clean_runs_never_pass(run_once, tmp_path, file, damage):
    _, directory = run_once("three_pool_ones")
    stored = Path(shutil.copytree(directory, tmp_path / "run"))
    assert run("judge", stored, "--quiet") == 0
    damage(min(stored.glob(file)))
    assert run("judge", stored, "--quiet") in (1, 3)


@pytest.mark.distributed
def test_stored_runs_are_not_overwritten(stored, capsys):
    before = sorted(p.name for p in stored.iterdir())
    assert run("run", shipped("three_pool_ones"), "--out", stored) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert sorted(p.name for p in stored.iterdir()) == before


def test_places_that_cannot_be_written(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("x")
    assert run("run", shipped("three_pool_ones"), "--out", file / "run") == 2
    assert "cannot be written" in capsys.readouterr().err
    assert run("run", shipped("three_pool_ones"), "--out", "/proc/sumgrad") == 2
    assert "cannot be written" in capsys.readouterr().err
