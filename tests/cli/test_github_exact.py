"""Annotations: one line a cause, at a line of the repository, escaped as GitHub reads it."""

from __future__ import annotations

import pytest
from sumgrad.base.verdict import Verdict
from sumgrad.report.github import workflow_lines


def verdict_of(status="fail", *causes, **more):
    data = {"status": status, "workload": "my:Step, a", "topology": {"name": "dp3"},
            "diagnoses": list(causes), "findings": [], "not_compared": [], **more}  # fmt: skip
    return Verdict(status=status, tiers=(), diagnoses=(), coefficients=(), data=data)


def cause(text, *because, standing="proved"):
    return {"cause": text, "because": list(because), "standing": standing}


@pytest.fixture
def root(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "step.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(("found", "line"), [
    (cause("averaged at src/step.py:31"),
     "::error file=src/step.py,line=31,title=sumgrad FAIL%3A my%3AStep%2C a::averaged at "
     "src/step.py:31 (proved)"),
    (cause("it", "no place", "in (MLP at src/step.py:7)"), "file=src/step.py,line=7,"),
    (cause("at /etc/passwd.py:1 and other.py:3"), "::error title="),
    (cause("at ../src/step.py:31"), "::error title="),
    (cause("50 %\nof it\r"), "::50 %25%0Aof it\\r (proved)"),
])  # fmt: skip
def test_a_cause_is_one_line_at_its_place(root, found, line):
    (got,) = workflow_lines(verdict_of("fail", found), root=root)
    assert line in got
    assert "\n" not in got
    assert "\r" not in got


def test_what_else_a_verdict_says(root):
    assert list(workflow_lines(verdict_of("unknown", not_compared=["rank 1 hung"]), root=root)) == [
        "::warning title=sumgrad UNKNOWN%3A my%3AStep%2C a::rank 1 hung"
    ]
    (right,) = workflow_lines(verdict_of("pass"), root=root)
    assert right.startswith("::notice ")
    assert len(list(workflow_lines(verdict_of("fail", cause("a"), cause("b")), root=root))) == 2
