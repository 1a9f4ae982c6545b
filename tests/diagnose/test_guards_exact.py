"""Conditions of explainers that no whole failure met: each with what it keeps out."""

from __future__ import annotations

from types import SimpleNamespace as Of

import pytest
import torch
from sumgrad.diagnose import row_fit
from sumgrad.diagnose.explainers.of_ledgers import ledger
from sumgrad.diagnose.explainers.of_others import other_parts
from sumgrad.diagnose.modules.autograd.saved_inputs import _rank_of
from sumgrad.diagnose.modules.how_wrong import elsewhere
from sumgrad.record.trace import INTO


@pytest.mark.parametrize(("bad", "wanted"), [((), True), ((0,), False), ((1,), False)])
def test_a_fit_holds_where_no_cell_fails_the_last_one_neither(bad, wanted, monkeypatch):
    monkeypatch.setattr(row_fit, "fails", lambda cell, rest, factor: cell.number in bad)
    monkeypatch.setattr(row_fit, "_size", lambda cell: 1.0)
    cells = [Of(number=0), Of(number=1)]
    masks = [torch.tensor([True]), torch.tensor([True])]
    fit = Of(values=[2.0, None], residual=torch.zeros(2), explained=1.0)
    assert row_fit._accepted(cells, masks, fit) is wanted


def test_of_equal_inputs_the_calls_own_is_the_one_that_was_saved():
    call = Of(module="up", number=2)
    assert _rank_of(Of(module=f"{INTO}up", number=2), call) == 0
    assert _rank_of(Of(module=f"{INTO}up", number=1), call) == 1
    assert _rank_of(Of(module=f"{INTO}down", number=2), call) == 2


def test_without_a_failing_cell_no_parts_were_added(monkeypatch):
    monkeypatch.setattr(other_parts, "given_by_ranks", lambda case: {0: ({}, {})})
    assert list(other_parts.other_parts_were_added(Of(failing_cells=[]), Of())) == []


def test_a_rank_that_left_no_record_took_no_sum():
    case = Of(record=Of(ranks={}), tier="structure", step=0)
    assert ledger._takes_a_sum(case, 1, Of(events={1: {"n": 5}})) is False


def test_only_the_first_reduction_into_which_something_else_goes_is_said(monkeypatch):
    monkeypatch.setattr(ledger, "wrong_parameters", lambda case: {"w"})
    monkeypatch.setattr(ledger, "reductions_of", lambda case: [1, 2, 3])
    monkeypatch.setattr(ledger, "describe", lambda record, joint: "it")
    found = {1: None, 2: Of(cause="the second"), 3: Of(cause="the third")}
    monkeypatch.setattr(ledger, "_something_else_goes_in", lambda case, joint, *_: found[joint])
    assert ledger.something_else_goes_in(Of(record=None)) == ("the second",)


@pytest.mark.parametrize(
    ("row", "wanted"),
    [([1.0, 0, 3, 0], True), ([1.0, 0, 0, 0], False), ([1.0, 0, 4, 0], False),
     ([1.0, 2, 3, 4], False)],
)  # fmt: skip
def test_two_numbers_that_are_left_tell_which_vector_it_was(row, wanted, monkeypatch):
    whole = {("up", 0): Of(outputs=torch.tensor([[9.0, 9, 9, 9], [1, 2, 3, 4]]).double())}
    monkeypatch.setattr(elsewhere, "by_module", lambda single, chosen: whole)
    seen = [Of(call=Of(module="up", part=0), rank=0, wrong=torch.tensor([True]))]
    trace = Of(output_of=lambda call: torch.tensor([row]).double())
    traces = Of(single=None, ranks={0: trace})
    assert elsewhere.zeroed(traces, seen, "float64") is wanted
    assert elsewhere.zeroed(traces, seen, "float32") is False
    assert elsewhere.zeroed(traces, [], "float64") is False


def test_digits_that_do_not_fit_the_deviation_say_nothing_of_others_that_do(monkeypatch):
    joints = [Of(events={0: {"dtype": d}}, first={"numel": 8}, ranks=[0, 1])
              for d in ("bfloat16", "float32")]  # fmt: skip
    monkeypatch.setattr(ledger, "joint_operations", lambda *_: joints)
    monkeypatch.setattr(ledger, "fitted", lambda case: None)
    monkeypatch.setattr(ledger, "describe", lambda record, joint: "the all-reduce")
    monkeypatch.setattr(ledger, "_relative_error", lambda cell: 1e-9)
    monkeypatch.setattr(ledger, "explained", lambda case, diagnosis, **_: diagnosis)
    record = Of(spec=Of(tiers={"structure": "float64"}))
    case = Of(has_plan=False, record=record, tier="structure", step=0, failing_cells=[1])
    assert [d.cause for d in ledger.runs_narrow(case, frozenset())] == [
        "the all-reduce runs in float32"
    ]
