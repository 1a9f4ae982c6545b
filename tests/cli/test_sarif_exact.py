"""SARIF: one result for each cause at a line of the repository, read by a strict reader."""

from __future__ import annotations

import json

import pytest
from sarif_pydantic import Sarif
from sumgrad.base.verdict import Verdict
from sumgrad.report.grid import Grid
from sumgrad.report.sarif import grid_to_sarif, to_sarif


def verdict_of(status="fail", *causes, **more):
    data = {"status": status, "workload": "src/step.py:Step", "topology": {"name": "dp3"},
            "diagnoses": list(causes), "findings": [], "not_compared": [], **more}  # fmt: skip
    return Verdict(status=status, tiers=(), diagnoses=(), coefficients=(), data=data)


def cause(text, *because, kind="averaged"):
    return {"cause": text, "because": list(because), "standing": "proved", "kind": kind}


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "step.py").write_text("")
    (tmp_path / "src" / "an axis.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    return tmp_path


def results(text):
    known = Sarif.model_validate_json(text)
    assert _unknown(known) == []
    (run,) = known.runs
    assert run.tool.driver.name == "sumgrad"
    assert {r.rule_id for r in run.results} == {rule.id for rule in run.tool.driver.rules}
    return run.results


def _unknown(model, at=""):
    """Names in the file that the reader has no field for."""
    out = [f"{at}.{name}" for name in model.model_extra or {}]
    for name in type(model).model_fields:
        value = getattr(model, name)
        for one in value if isinstance(value, list) else [value]:
            if hasattr(one, "model_extra"):
                out += _unknown(one, f"{at}.{name}")
    return out


def place(result):
    (location,) = result.locations
    where = location.physical_location
    return where.artifact_location.uri, where.region.start_line


def test_every_cause_is_a_result_at_its_line():
    first, second, third = results(
        to_sarif(
            verdict_of(
                "fail",
                cause("averaged at src/step.py:31"),
                cause("50 % <b>\n", "in src/an.py:3 and in src/step.py:7", kind="open"),
                cause("at /etc/passwd.py:1"),
            )
        )
    )
    assert [place(r) for r in (first, second, third)] == [
        ("src/step.py", 31), ("src/step.py", 7), ("src/step.py", 1),  # the Program's file
    ]  # fmt: skip
    assert [r.rule_id for r in (first, second, third)] == ["averaged", "open", "averaged"]
    assert first.level.value == "error"
    assert first.message.text == (
        "sumgrad FAIL: src/step.py:Step\naveraged at src/step.py:31 (proved)"
    )


def test_a_file_is_an_address():
    verdict = verdict_of("fail", workload="src/an axis.py:Step", findings=["rank 1: none"])
    (result,) = results(to_sarif(verdict))
    assert place(result) == ("src/an%20axis.py", 1)
    assert result.rule_id == "finding"


def test_the_repository_is_where_github_says(root, monkeypatch):
    monkeypatch.setenv("GITHUB_WORKSPACE", str(root))
    monkeypatch.chdir(root / "src")
    (result,) = results(to_sarif(verdict_of("fail", cause("at src/step.py:31"))))
    assert place(result) == ("src/step.py", 31)


def test_what_is_not_known_warns_and_what_is_right_is_no_result():
    verdict = verdict_of("unknown", workload="pkg.mod:Step", not_compared=["rank 1 hung"])
    (result,) = results(to_sarif(verdict))
    assert result.level.value == "warning"
    assert result.message.text.endswith("\nrank 1 hung")
    assert result.locations is None
    assert results(to_sarif(verdict_of("pass"))) == []
    assert json.loads(to_sarif(verdict_of("pass")))["version"] == "2.1.0"


def test_of_a_matrix_every_thing_that_fails_it():
    grid = Grid(title="faults", status="fail", summary="2", tables=(), first=("a missed", "b"))
    assert [r.message.text for r in results(grid_to_sarif(grid))] == [
        "sumgrad FAIL: faults\na missed", "sumgrad FAIL: faults\nb",
    ]  # fmt: skip
