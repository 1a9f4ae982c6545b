"""Gradients of few digits: a cause where that is all that is wrong of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers import last

RIGHT = torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
NARROW = RIGHT.bfloat16().double()


def found(*measured, tier="float64", has_plan=False, monkeypatch):
    monkeypatch.setattr(last, "explained", lambda case, diagnosis: diagnosis)
    monkeypatch.setattr(last, "_right", lambda case: ())
    wanted = SimpleNamespace(value=RIGHT)
    cells = [
        SimpleNamespace(name=f"p{i}", measured=m, wanted=wanted) for i, m in enumerate(measured)
    ]
    spec = SimpleNamespace(tiers={"structure": tier})
    case = SimpleNamespace(failing_cells=cells, has_plan=has_plan, tier="structure",
                           record=SimpleNamespace(spec=spec))  # fmt: skip
    return [one.cause for one in last.low_digits(case, None)]


def test_all_that_is_wrong_are_digits(monkeypatch):
    said = found(NARROW, NARROW, monkeypatch=monkeypatch)
    assert said == ["p0, p1 has only bfloat16 digits"]
    assert found((RIGHT * 1.02).bfloat16().double(), monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("measured", "more"),
    [
        ((NARROW, RIGHT * 1.01), {}),
        (((RIGHT * 1.2).bfloat16().double(),), {}),  # and off by more than these digits
        ((NARROW,), {"tier": "bfloat16"}),  # the step has no others
        ((NARROW,), {"has_plan": True}),
        ((torch.zeros(40).double(),), {}),
        ((NARROW[:1].expand(40),), {}),  # one number
    ],
)
def test_what_has_another_cause(monkeypatch, measured, more):
    assert found(*measured, **more, monkeypatch=monkeypatch) == []
