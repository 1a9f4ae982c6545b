"""A common factor that a line makes: it divides by another count than the batch has."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.weighing import count_divided_by
from sumgrad.diagnose.explainers.by_modules.weighing.count_divided_by import by_another_count
from sumgrad.subjects.program.watched.computations import Computations

X = torch.arange(1.0, 7.0, dtype=torch.float64)
HALF = Diagnosis(cause="every gradient is multiplied by 1/2, which equals 1/dp", kind="factor",
                 ranks=(0, 1), factor="1/2", symbol="1/dp", also=("1/tp",),
                 however=("1/tp gives the same number",))  # fmt: skip


def recorded(by, also=None, each=False):
    x = X.clone().requires_grad_()
    with Computations(lambda: ((), 0)) as computations:
        count = by + torch.zeros(()) if isinstance(by, float) else by
        loss = x.square() if each else x.square().sum()
        loss = loss / count
        (loss / also if also else loss).sum().backward()
    return computations.computed()


def said(monkeypatch, ranks, diagnosis=HALF, count=29, there=False):
    lines = SimpleNamespace(states=SimpleNamespace(ranks=[*range(len(ranks))]),
                            computed=lambda rank: ranks[rank],
                            is_run_there=lambda line: there)  # fmt: skip
    monkeypatch.setattr(count_divided_by, "known_lines", lambda case: lines)
    case = SimpleNamespace(reference=SimpleNamespace(counts={"loss": count}))
    return by_another_count(case, diagnosis)


@pytest.mark.parametrize("by", [58.0, 58])
def test_the_line_that_divides_by_twice_the_count(monkeypatch, by):
    found = said(monkeypatch, [recorded(by), recorded(by)])
    assert found.cause.startswith("every gradient is multiplied by 1/2: ")
    assert "`loss = loss / count` divides by " in found.cause
    assert found.cause.endswith("58, which is 2 times the count of the full batch, 29")
    assert ("what is made at" in found.cause) == isinstance(by, float)
    assert (found.kind, found.symbol, found.also, found.however) == ("wrong_count", None, (), ())


@pytest.mark.parametrize("ranks", [
    [(29.0,), (29.0,)],  # the right one
    [(58.0,), (29.0,)],  # on one rank alone
    [(58.0,), (57.0,)],
    [(58.0, 58.0), (58.0, 58.0)],  # which of them is not known
    [(2.0,), (2.0,)],  # by which it is half, and no count
])  # fmt: skip
def test_no_other_line(monkeypatch, ranks):
    assert said(monkeypatch, [recorded(*own) for own in ranks]) == HALF


def test_a_line_of_the_single_process_or_of_many_numbers_is_not_to_blame(monkeypatch):
    """As that which divides the scores of an attention."""
    ranks = [recorded(58.0)] * 2
    assert said(monkeypatch, ranks, there=True) == HALF
    assert said(monkeypatch, [recorded(58.0, each=True)] * 2) == HALF


def test_of_one_factor_on_all_gradients_alone(monkeypatch):
    ranks = [recorded(58.0)] * 2
    other = replace(HALF, cause="a.weight is multiplied by 1/2")
    assert said(monkeypatch, ranks, other) == other
    kind = replace(HALF, kind="depth_factor")
    assert said(monkeypatch, ranks, kind) == kind
    third = replace(HALF, factor="1/3")
    assert said(monkeypatch, ranks, third) == third
