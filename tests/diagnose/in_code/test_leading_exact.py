"""What the ranks do otherwise leads a report that else says where, and no other."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.in_code import branches
from sumgrad.diagnose.explainers.by_modules.in_code.branches import (
    Branch,
    lines_are_left_out,
    with_branches,
)
from sumgrad.diagnose.explainers.by_modules.leading import led_by
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong

PUT = ("/x/net.py:7", "y = y[order]")
OWN = ("/x/net.py:9", "y = gather(y)")


@pytest.mark.parametrize(
    ("kind", "standing", "leads"),
    [
        ("forward", "likely", True),
        ("open", "open", True),
        ("row_factors", "proved", False),
        ("double_reduction", "likely", False),
    ],
)
def test_only_a_place_that_is_not_proved_stands_behind_it(kind, standing, leads):
    told = led_by(Diagnosis(cause="open: c", kind=kind, standing=standing, because=("b",)), "text")
    if leads:
        assert (told.cause, told.because, told.standing) == ("text", ("c", "b"), "likely")
    else:
        assert (told.cause, told.because) == ("open: c", ("text", "b"))
        assert told.standing == standing


@pytest.mark.parametrize(
    ("here", "there", "leads"), [((), (PUT,), True), ((OWN,), (PUT,), False), ((OWN,), (), False)]
)
def test_lines_that_are_left_out_on_the_ranks_come_first(monkeypatch, here, there, leads):
    one = Branch(within="net.py Net.forward", ranks=(0, 1), here=here, there=there)
    found = FirstWrong(wrong="m", seen=())
    monkeypatch.setattr(branches, "looked", lambda case: "look")
    monkeypatch.setattr(branches, "first_wrong_forward", lambda look: found)
    monkeypatch.setattr(branches, "branches", lambda *_, back: [one])
    monkeypatch.setattr(branches, "first_lines", lambda *_, back: [])
    traces = SimpleNamespace(ranks={}, single=SimpleNamespace(computed=None))
    case = SimpleNamespace(traces=traces)
    told = with_branches(case, Diagnosis(cause="c", kind="forward", because=("b",)))
    assert (told.cause == one.in_words()) == leads
    assert told.because == (("c", "b") if leads else (one.in_words(), "b"))
    assert lines_are_left_out(case, found) == leads
