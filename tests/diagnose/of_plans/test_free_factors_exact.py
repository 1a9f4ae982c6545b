"""Which factors are read from gradients that no edge explains, and which are not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from records_in_memory import planned_record, with_rank
from sumgrad.diagnose.case import Case, case_of, deviation
from sumgrad.diagnose.explainers.of_plans import free_factors
from sumgrad.diagnose.explainers.of_plans.free_factors import (
    MAX_INTERVALS,
    _by_rank_rows,
    _intervals,
    _levels,
    fewest_factors,
)
from sumgrad.diagnose.explanation import choose
from sumgrad.diagnose.fit import as_fraction, fit_deviation
from sumgrad.judge.cells import compare
from sumgrad.judge.finding import Compared
from sumgrad.judge.knowledge import known_plan
from sumgrad.plan.schedule import Mismatch

KEY = ("structure", 0)


@pytest.fixture(scope="module")
def record():
    return planned_record(steps=1, tiers={"structure": "float64"})


def wrong(record, factors, *, ranks=(0, 1, 2), off=None):
    """The CI pool's gradients with other factors. factors: (term, producer, (a, b)) -> factor."""
    partials = record.partials("structure")[0]
    for rank in ranks:
        grads = dict(record.ranks[rank].grads[KEY])
        for (term, producer, rows), factor in factors.items():
            chosen = slice(None) if rows is None else slice(*rows)
            held = partials[term, producer]
            grads = {n: g + (factor - 1) * held[n][chosen].sum(0) for n, g in grads.items()}
        if off is not None:
            grads = {n: g + off[: g.numel()].view(g.shape) for n, g in grads.items()}
        record = with_rank(record, rank, grads={KEY: grads})
    return record


def failed_case(record, mismatches=()) -> Case | None:
    return case_of(Compared(record=record, diffs=compare(record), again=(), mismatches=mismatches))


def case_of_step(record) -> Case:
    return Case(record=record, tier="structure", step=0)


def explain(record, mismatches=()):
    case = failed_case(record, mismatches)
    if case is None:
        return [], []
    return choose(case, [fewest_factors])


def factors_of(coefficients):
    return {(c.term, c.producer, c.rows): c.fraction for c in coefficients}


CI = [("stoch", "b0"), ("stoch", "b1"), ("imp", "ci"), ("ppgd", "ppgd")]


def test_a_right_run_has_nothing_to_explain(record):
    assert explain(record) == ([], [])


def test_one_factor_on_everything(record):
    half = wrong(record, {(t, p, None): 0.5 for t, p in CI})
    (cause,), found = explain(half)
    assert cause.kind == "free_factor"
    assert cause.cause.startswith("one factor on everything: 1/2")
    assert (cause.factor, cause.ranks, cause.term) == ("1/2", (0, 1, 2), None)
    assert cause.because == ("with it the residual of ci_fn is under the threshold",)
    assert factors_of(found) == {(t, p, None): "1/2" for t, p in CI}
    assert all(c.recovered == pytest.approx(0.5, abs=1e-12) and c.identifiable for c in found)
    assert {(c.params, c.ranks, c.expected) for c in found} == {("ci_fn", (0, 1, 2), "1")}
    third = wrong(record, {(t, p, None): 1 / 3 for t, p in CI})
    (cause,), _ = explain(third)
    assert cause.symbol == "1/ci.dp"
    assert "1/3 = 1/ci.dp" in cause.cause


def test_the_fewest_factors_first(record):
    (cause,), found = explain(wrong(record, {("imp", "ci", None): 3.0}))
    assert cause.cause.startswith("a factor on imp: 3")
    assert (cause.factor, cause.term) == ("3", "imp")
    assert factors_of(found) == {("imp", "ci", None): "3"}
    (cause,), found = explain(wrong(record, {("stoch", "b1", None): 0.25}))
    assert cause.cause.startswith("a factor on stoch of b1: 1/4")
    assert factors_of(found) == {("stoch", "b1", None): "1/4"}
    both = wrong(record, {("stoch", "b1", None): 0.25, ("imp", "ci", None): 3.0})
    (cause,), found = explain(both)
    assert " and a factor on " in cause.cause
    assert ", which no single edge" in cause.cause
    assert "and 1 more" in cause.cause
    assert factors_of(found) == {("stoch", "b1", None): "1/4", ("imp", "ci", None): "3"}
    each = wrong(record, {(t, p, None): f for (t, p), f in zip(CI, (2.0, 0.5, 3.0, 0.25),
                                                              strict=True)})  # fmt: skip
    (cause,), found = explain(each)
    assert cause.cause.startswith("a factor on each term")
    assert factors_of(found) == {
        ("stoch", "b0", None): "2", ("stoch", "b1", None): "1/2", ("imp", "ci", None): "3",
        ("ppgd", "ppgd", None): "1/4",
    }  # fmt: skip


def test_rows_of_a_rank(record):
    a, b = known_plan(record).rows(3)
    one = wrong(record, {("stoch", "b0", (a, b)): 2.0})
    (cause,), found = explain(one)
    assert cause.cause.startswith("a factor on stoch of b0 on the rows of rank 3 (b0[0]): 2")
    assert factors_of(found)["stoch", "b0", (a, b)] == "2"


def test_several_readings_that_fit_determine_nothing():
    """A pool of one rank with all rows: its term and its rows are the same cells."""
    one = planned_record(steps=1, tiers={"structure": "float64"})
    partials = one.partials("structure")[0]
    for name in partials["ppgd", "ppgd"]:
        if name.startswith("ci."):
            partials["ppgd", "ppgd"][name] = partials["imp", "ci"][name].clone()
    for r in range(3):
        grads = {KEY: {n: g + partials["imp", "ci"][n].sum(0)
                       for n, g in one.ranks[r].grads[KEY].items()}}  # fmt: skip
        one = with_rank(one, r, grads=grads)
    (cause,), found = explain(one)
    assert cause.however == ("other groups of terms fit as well, so no coefficient is determined",)
    assert cause.also
    assert len(cause.also) <= 4
    assert all(c.recovered is None and c.fraction is None and not c.identifiable for c in found)
    assert all(c.sigma is None for c in found)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_residual_over_the_threshold_explains_nothing(record, sign):
    """The threshold is 4e-13 and grows with a factor above 1; an error on one element decides."""
    for factor, times in ((0.5, 1.0), (8.0, 8.0)):
        clean = wrong(record, {("imp", "ci", None): factor})
        off = torch.zeros(12).double()
        off[1] = sign * times * 3.4e-13
        near = wrong(record, {("imp", "ci", None): factor}, off=off)
        (cause,), _ = explain(near)
        assert cause.kind == "free_factor"
        off[1] = sign * times * 6e-13
        far = wrong(record, {("imp", "ci", None): factor}, off=off)
        (cause,), found = explain(far)
        assert cause.kind == "open", (factor, cause.cause)
        assert found == []
        assert clean is not far


def test_a_factor_that_explains_a_part_of_a_small_deviation_is_none(record):
    """Just over the threshold any factor's residual is under it, whatever it is made of."""
    generator = torch.Generator().manual_seed(5)
    noise = 1e-13 * torch.sign(torch.randn(12, generator=generator, dtype=torch.float64))
    small = wrong(record, {("imp", "ci", None): 1 + 1.5e-13}, off=noise)
    (cause,), _ = explain(small)
    assert cause.kind == "open"


def test_three_elements_are_enough_for_a_factor_and_two_are_not(record, monkeypatch):
    half = wrong(record, {(t, p, None): 0.5 for t, p in CI})
    (holder,) = failed_case(half).failing
    elements = len(deviation(holder))
    monkeypatch.setattr(free_factors, "MIN_ELEMENTS", elements)
    assert explain(half)[0][0].kind == "free_factor"
    monkeypatch.setattr(free_factors, "MIN_ELEMENTS", elements + 1)
    assert explain(half)[0][0].kind == "open"


def test_noise_is_no_weighting_bug_and_says_what_came_nearest(record):
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(12, generator=generator, dtype=torch.float64)
    mismatch = Mismatch(rank=0, label="l", edge="e", planned=None, seen=None, site=None)
    (cause,), found = explain(wrong(record, {}, off=noise), [mismatch] * 3)
    assert (cause.kind, found) == ("open", [])
    assert cause.cause == ("open: ci_fn is wrong on rank 0-2 and no cause of it is proved")
    assert cause.however[0].endswith("% of the deviation")
    assert not cause.however[0].startswith("nothing explains 0.0000")
    assert [b for b in cause.because if b.startswith("the ledger differs from the plan")] == [
        f"the ledger differs from the plan: {mismatch}"
    ] * 2


def test_holders_with_one_cause_are_one_diagnosis(record):
    other = wrong(record, {("imp", "ci", None): 3.0}, ranks=(0, 1))
    other = wrong(other, {("imp", "ci", None): 3.0}, off=torch.full((12,), 1e-15).double(),
                  ranks=(2,))  # fmt: skip
    (cause,), found = explain(other)
    assert cause.ranks == (0, 1, 2)
    assert len(found) == 2
    two = wrong(record, {("imp", "ci", None): 3.0}, ranks=(0,))
    two = wrong(two, {("imp", "ci", None): 2.0}, ranks=(1,))
    causes, _ = explain(two)
    assert [(c.factor, c.ranks) for c in causes] == [("3", (0,)), ("2", (1,))]
    alike = wrong(wrong(record, {("imp", "ci", None): 3.0}, ranks=(0,)),
                  {("ppgd", "ppgd", None): 3.0}, ranks=(1,))  # fmt: skip
    causes, _ = explain(alike)  # one factor, but of two terms
    assert [(c.factor, c.term, c.ranks) for c in causes] == [
        ("3", "imp", (0,)), ("3", "ppgd", (1,))
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    noise = [torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(2)]
    unexplained = wrong(wrong(record, {}, off=noise[0], ranks=(0,)), {}, off=noise[1], ranks=(1,))
    causes, _ = explain(unexplained)
    assert [(c.kind, c.ranks) for c in causes] == [("open", (0, 1))]


def test_which_groups_of_cells_are_tried(record, monkeypatch):
    case = case_of_step(wrong(record, {("imp", "ci", None): 3.0}))
    (holder,) = case.failing
    levels = list(_levels(case, holder))
    assert [label for label, _ in levels[0]] == ["one factor on everything"]
    names = [label for label, _ in levels[1]]
    assert names[:3] == ["a factor on imp", "a factor on ppgd", "a factor on stoch"]
    assert "a factor on stoch of b0" in names
    assert "a factor on imp of ci" not in names  # it is all of imp
    cells = [frozenset((c.term, c.producer, c.rows) for c in g[0]) for _, g in levels[1]]
    assert len(cells) == len(set(cells))
    for _, (a, b) in levels[2]:
        assert not {(c.term, c.producer, i) for c in a for i in range(*(c.rows or (0, 8)))} & {
            (c.term, c.producer, i) for c in b for i in range(*(c.rows or (0, 8)))
        }
    singles = levels[1][: 3 * 4]
    assert 0 < len(levels[2]) <= len(singles) * (len(singles) - 1) // 2
    labels = {label for label, _ in levels[2]}
    assert "a factor on imp and a factor on ppgd" in labels
    assert "a factor on stoch and a factor on stoch of b0" not in labels
    assert [label for label, _ in levels[3]] == ["a factor on each term"]
    assert len(levels[3][0][1]) == 4
    (label, groups) = levels[4][0]
    assert label == "a factor on each term and row interval"
    assert len(groups) <= MAX_INTERVALS
    for most, tried in ((len(groups), 5), (len(groups) - 1, 4)):
        monkeypatch.setattr(free_factors, "MAX_INTERVALS", most)
        assert len(list(_levels(case, holder))) == tried


def test_rows_of_ranks_and_intervals(record):
    case = case_of_step(wrong(record, {("imp", "ci", None): 3.0}))
    (holder,) = case.failing
    terms = _levels(case, holder).__next__()[0][1][0]
    labels = dict(_by_rank_rows(case, terms))
    assert len([t for t in labels if t.startswith("a factor on the rows of")]) == 9
    for rank in range(9):
        cells = labels[f"a factor on the rows of {case.plan.topology.place(rank)}"]
        assert {c.rows for c in cells} == {case.plan.rows(rank)}
        assert [(c.term, c.producer) for c in cells] == [(t.term, t.producer) for t in terms]
    stoch = next(t for t in terms if t.producer == "b0")
    cuts = sorted({*case.plan.offsets["b0"], *case.plan.offsets["ci"]})
    assert [c.rows for c in _intervals(case, stoch)] == list(itertools.pairwise(cuts))
    imp = next(t for t in terms if t.term == "imp")
    own = case.plan.offsets["ci"]
    assert [c.rows for c in _intervals(case, imp)] == list(itertools.pairwise(own))
    once = replace(imp, rows=None)
    assert _intervals(case, once) == [once]


# ---- least squares at its bounds -----------------------------------------------------------------


def test_directions_without_information_and_with_a_little():
    """Two columns that differ by a part of 5e-9 are told apart; by 1e-10 they are not."""
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    for part, known in ((1e-7, True), (5e-9, True), (1e-10, False)):
        near = a + part * b
        fit = fit_deviation([a, near], 0.5 * a)
        assert (fit.values[0] is not None) == known
        assert (fit.values[1] is not None) == known
    # A column of which a part of 1e-4 lies in a direction without information has no coefficient.
    c = b + 1e-2 * a
    fit = fit_deviation([a, a.clone(), c], 2 * b)
    assert fit.values[:2] == [None, None]
    mixed = fit_deviation([a, b, a + 1e-2 * b], b)
    assert mixed.values == [None, None, None]


@pytest.mark.parametrize(
    ("value", "sigma", "fraction"),
    [
        (0.25, 0.0124, None),  # four errors allow too many others
        (0.5, 0.003, Fraction(1, 2)),
        (0.5, 0.0032, None),
        (0.501, 2.6e-4, Fraction(1, 2)),
        (0.501, 2.4e-4, None),
        (1.0, 0.0124, Fraction(1)),
        (1.0, 0.0126, None),
        (1 / 4096, 1e-14, Fraction(1, 4096)),
        (1 / 4097, 1e-16, None),
        (1e6 + 0.5, 0.0, Fraction(2000001, 2)),
        (1 / 3 + 3e-13, 0.0, Fraction(1, 3)),
        (1 / 3 + 3e-12, 0.0, None),
        (0.25, None, None),
        (float("inf"), 0.0, None),
    ],
)
def test_when_a_number_is_a_fraction(value, sigma, fraction):
    assert as_fraction(value, sigma) == fraction


def test_what_a_fit_leaves_and_explains():
    a = torch.tensor([3.0, 4.0, 0.0, 0.0]).double()
    fit = fit_deviation([a], torch.tensor([3.0, 4.0, 0.0, 5.0]).double())
    assert fit.values == [pytest.approx(2)]
    assert fit.residual.tolist() == pytest.approx([0, 0, 0, 5])
    assert fit.explained == pytest.approx(0.5)
    # sigma = sqrt(25 / 3) / |a|
    assert fit.sigmas == [pytest.approx((25 / 3) ** 0.5 / 5)]
    none = fit_deviation([torch.zeros(4).double()], a)
    assert (none.values, none.sigmas, none.explained) == ([None], [None], 0)
    exact = fit_deviation([a[:1]], a[:1])
    assert exact.sigmas == [pytest.approx(0, abs=1e-15)]
    assert fit_deviation([], a).residual is a
