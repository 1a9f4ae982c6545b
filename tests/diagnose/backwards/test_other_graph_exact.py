"""A line that autograd passes on the ranks alone, or in the single process alone, comes first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.backwards.other_graph import with_another_graph
from sumgrad.diagnose.explainers.by_modules.in_code import lines as of_lines
from sumgrad.diagnose.explainers.by_modules.in_code import solved
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.subjects.program.watched.computations import Computations

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def views(x, kept):
    """Two of them; of one the target has no gradient."""
    first, second = x.sin(), x.cos()
    target = second if kept else second.detach()
    return first * target + second


def lines_of(kept):
    with Computations(lambda: ((), 0)) as computations:
        views(X.clone().requires_grad_(), kept).sum().backward()
    return computations.computed()


@pytest.fixture
def case(monkeypatch, request):
    here, there = request.param
    traces = SimpleNamespace(
        ranks={r: SimpleNamespace(computed=lines_of(here), calls=()) for r in (0, 1)},
        single=SimpleNamespace(computed=lines_of(there), params={}),
    )
    held = Lines(traces, (), 1e-8)
    for module in (of_lines, solved):
        monkeypatch.setattr(module, "known_lines", lambda case: held)
    return SimpleNamespace(traces=traces)


@pytest.mark.parametrize("case", [(False, True)], indirect=True)
@pytest.mark.parametrize("kind", ["loss_weights", "backward", "open"])
def test_where_the_way_is_cut_is_told_before_what_is_seen_of_it(case, kind):
    said = with_another_graph(case, Diagnosis(cause="rows are lost", kind=kind, because=("b",)))
    assert said.cause.startswith("autograd knows nothing of what")
    assert "in it `second.detach()` gives on rank 0-1" in said.cause
    assert said.because == ("rows are lost", "b")


@pytest.mark.parametrize("case", [(False, True)], indirect=True)
def test_what_is_said_already_is_not_said_twice(case):
    first = with_another_graph(case, Diagnosis(cause="c", kind="open"))
    again = with_another_graph(case, Diagnosis(cause="c", kind="open", because=(first.cause,)))
    assert again == first
    assert with_another_graph(case, first) == first


@pytest.mark.parametrize("case", [(False, True)], indirect=True)
def test_beside_a_cause_that_says_what_is_done_it_is_evidence(case):
    said = with_another_graph(case, Diagnosis(cause="c", kind="factor", because=("b",)))
    assert said.cause == "c"
    assert [text[:24] for text in said.because] == ["autograd knows nothing o", "b"]
    for kind in ("forward", "double_reduction"):
        one = Diagnosis(cause="c", kind=kind, because=("b",))
        assert with_another_graph(case, one) == one


@pytest.mark.parametrize("case", [(True, True), (False, False)], indirect=True)
def test_equal_ways_are_not_told(case):
    one = Diagnosis(cause="c", kind="open")
    assert with_another_graph(case, one) == one
