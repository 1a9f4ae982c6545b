"""An explainer that does not end takes neither the verdict nor the other causes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from sumgrad.base.time_limit import TookTooLong, time_limit
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose import diagnose as diagnosing
from sumgrad.diagnose import explanation
from sumgrad.diagnose.explanation import BROKEN, Explanation, choose


def never_ends(*_):
    while True:
        pass


def says_so(case, left):
    yield Explanation(diagnosis=Diagnosis(cause="it is this", kind="this"), explains=left)


def test_an_explainer_that_does_not_end_is_passed_over(monkeypatch):
    monkeypatch.setattr(explanation, "PART_S", 0.05)
    case = SimpleNamespace(parts=2, known={}, contradicted=0)
    causes, _ = choose(case, [never_ends, says_so])
    assert [one.cause for one in causes] == ["it is this"]
    (error,) = case.known[BROKEN]
    assert isinstance(error, TookTooLong)
    assert "not done in the time" in diagnosing._broken(error).cause


def test_a_step_that_does_not_end_leaves_the_cause(monkeypatch):
    monkeypatch.setattr(diagnosing, "PART_S", 0.05)
    cause = Diagnosis(cause="it is this", kind="this")
    case = SimpleNamespace(known={})
    assert diagnosing._with(never_ends, case, cause) is cause
    assert case.known[BROKEN]
    monkeypatch.setattr(diagnosing, "first_wrong_modules", never_ends)
    assert diagnosing._where(case) is None


def test_in_another_thread_and_not_after_its_end():
    found = []

    def run():
        with pytest.raises(TookTooLong), time_limit(0.05):
            never_ends()
        with time_limit(0.05):
            found.append("done")
        threading.Event().wait(0.2)
        found.append("alive")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found == ["done", "alive"]
