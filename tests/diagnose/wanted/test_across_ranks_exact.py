"""What the ranks have together, or another has, is what a rank's value would have to be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards import other_graph
from sumgrad.diagnose.explainers.by_modules.in_code import solved
from sumgrad.diagnose.modules.values.value_states import ValueStates
from sumgrad.diagnose.modules.wanted.across_ranks import how_across
from sumgrad.diagnose.modules.wanted.how_apart import How
from sumgrad.diagnose.modules.wanted.inverses import Needed
from sumgrad.diagnose.modules.wanted.solved_back import SolvedBack
from sumgrad.subjects.program.watched.computations import Computations

G = torch.Generator().manual_seed(11)
HELD = [(rank, torch.randn(4, 1, generator=G, dtype=torch.float64)) for rank in (0, 2, 3)]
VALUES = torch.stack([value for _, value in HELD])


def need(value, spare=0):
    return Needed(value=value.clone(), spare=spare)


@pytest.mark.parametrize(
    ("wanted", "way"),
    [
        (VALUES.sum(0), "sum"),
        (VALUES.mean(0), "mean"),
        (VALUES.amax(0), "largest"),
        (VALUES.amin(0), "smallest"),
    ],
)
def test_what_all_of_them_have_together(wanted, way):
    assert how_across(HELD, 2, need(wanted)) == How("ranks", way=way, ranks=(0, 2, 3))
    assert how_across(HELD, 2, need(wanted * 1.0001)) is None


def test_what_another_rank_has_and_not_its_own():
    assert how_across(HELD, 0, need(VALUES[1])) == How("ranks", ranks=(2,))
    assert how_across(HELD, 2, need(VALUES[1])) is None


def test_a_number_that_another_has_too_may_be_chance_and_a_sum_is_none():
    held = [(rank, torch.full((2, 1), float(rank)).double()) for rank in (1, 2, 4)]
    two = torch.full((2, 1), 2.0).double()
    assert how_across(held, 1, need(two)) is None
    assert how_across(held, 1, need(two, spare=3)) == How("ranks", ranks=(2,))
    assert how_across(held, 1, need(two * 3.5)) == How("ranks", way="sum", ranks=(1, 2, 4))


def test_what_is_not_known_may_be_anything_but_something_has_to_be_known():
    some = VALUES.sum(0)
    some[1] = torch.nan
    assert how_across(HELD, 0, need(some)) == How("ranks", way="sum", ranks=(0, 2, 3))
    assert how_across(HELD, 0, need(torch.full((4, 1), torch.nan).double())) is None
    some[2] = torch.inf
    assert how_across(HELD, 0, need(some)) is None


def test_what_all_have_alike_is_told_by_a_factor():
    alike = [(rank, VALUES[0]) for rank in range(3)]
    assert how_across(alike, 0, need(3 * VALUES[0])) is None


X = torch.randn(5, 6, generator=G, dtype=torch.float64)
COST = torch.rand(5, 6, generator=G, dtype=torch.float64)
COLUMNS = [slice(0, 2), slice(2, 4), slice(4, 6)]


def recorded(run):
    with Computations(lambda: ((), 0)) as computations:
        run().backward()
    return computations.computed()


def risk_in_one_process():
    x = X.clone().requires_grad_()
    q = (x * 0.8).softmax(-1)
    return (q * COST).sum()


def weighed(x, cost, total, risk):
    """By hand: the derivative of the expected cost by what it is expected over."""
    q = (0.8 * x.detach()).exp() / total
    risk = (q * cost).sum(-1, keepdim=True) if risk is None else risk
    coefficient = 0.8 * q * (cost - risk)
    return (coefficient * x).sum()


def on_rank(at, *, right=False, twice=False):
    every = (0.8 * X).exp()
    total = every.sum(-1, keepdim=True)
    risk = (every / total * COST).sum(-1, keepdim=True) if right else None

    def run():
        x = X[:, at].clone().requires_grad_()
        out = weighed(x, COST[:, at], total, risk)
        return out + x.sin().sum() if twice else out

    return recorded(run)


def case_of(**flags):
    ranks = {r: SimpleNamespace(computed=on_rank(at, **flags)) for r, at in enumerate(COLUMNS)}
    single = SimpleNamespace(computed=recorded(risk_in_one_process), params={})
    return SimpleNamespace(traces=SimpleNamespace(ranks=ranks, single=single))


def states_of(case):
    return ValueStates(case.traces, [("cand", [[0, 1, 2]])], 1e-8)


@pytest.fixture
def known(monkeypatch):
    def known_lines(case):
        return SimpleNamespace(states=states_of(case))

    monkeypatch.setattr(solved, "known_lines", known_lines)
    monkeypatch.setattr(solved, "made_in_words", lambda case, rank, number: ["made there"])


def test_a_coefficient_made_by_hand_is_solved_for_from_the_gradient_it_makes(known):
    case = case_of()
    for rank in range(3):
        found = SolvedBack(case.traces, states_of(case)).solved_gradients(rank)
        told = {(one.mine.part, one.at): one for one in found}
        one = told["cost - risk", 1]
        assert one.how == How("ranks", way="sum", ranks=(0, 1, 2))
        assert one.need.spare == 5  # of ten numbers that are wrong, five tell the rest
        assert [*told] == [("cost - risk", 1)]
    first, made = solved.solved_from_gradients(case)
    assert "the sum of what rank 0-2 have there, the gradient of the second argument of" in first
    assert "`return (coefficient * x).sum()` would be right on rank 0-2" in first
    assert made == "made there"


def test_nothing_is_solved_for_where_gradients_are_right_or_come_by_two_ways(known):
    assert solved.solved_from_gradients(case_of(right=True)) == []
    assert solved.solved_from_gradients(case_of(twice=True)) == []


def test_it_leads_where_else_a_meant_detach_would(known):
    from sumgrad.base.verdict import Diagnosis

    case = case_of()
    said = other_graph.with_another_graph(case, Diagnosis(cause="c", kind="loss_weights"))
    assert "the sum of what rank 0-2 have there" in said.cause
    assert said.because == ("made there", "c")
    assert not any("autograd knows nothing" in text for text in (said.cause, *said.because))
    kept = Diagnosis(cause="c", kind="too_few_ranks")
    assert other_graph.with_another_graph(case, kept) == kept
