"""The line that gives shares of a loss their factors: what it multiplies or divides by."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.weighing import factor_lines as words
from sumgrad.diagnose.explainers.by_modules.weighing.factor_lines import _but_for
from sumgrad.diagnose.modules.in_code.factor_lines import (
    FactorLines,
    OtherNumber,
    Scaling,
    _one_factor,
    lines_with_factors,
    lines_with_other_numbers,
    numbers_in,
)
from sumgrad.diagnose.modules.where.loss_weights import Share
from sumgrad.record.computed import Computation
from sumgrad.record.trace import Call, Trace, Traces
from sumgrad.subjects.program.watched.computations import Computations
from torch.nn import functional as F

G = torch.Generator().manual_seed(7)
X = torch.randn(9, 4, generator=G, dtype=torch.float64)
WANTED = torch.randn(9, 4, generator=G, dtype=torch.float64)
WEIGHTS = torch.rand(9, 4, generator=G, dtype=torch.float64) + 0.5


def trace(losses, rows):
    """One call of `head` for each stretch of rows, and what a loss makes of its output."""
    calls, outputs = [], []
    with Computations(lambda: ((), 0)) as computations:
        for number, (low, high) in enumerate(rows):
            out = X[low:high].clone().requires_grad_() * 1.5
            losses(out, low, high, number)
            calls.append(Call(module="head", number=number, part=0, operation=0,
                              operation_back=0, recomputed=False))  # fmt: skip
            outputs.append(out.detach())
    return Trace(
        calls=tuple(calls),
        outputs=tuple(outputs),
        gradients=(None,) * len(calls),
        sources={},
        computed=computations.computed(),
    )


def share(rank, number, factor):
    return Share(rank=rank, number=number, rows=(), factor=factor, by_row={})


def found_with(losses, factors, *, single=None, rows=((0, 2), (2, 5))):
    """losses: of a rank its loss; factors: (rank, call) -> its factor."""
    whole = trace(single or (lambda out, low, high, number: summed(out, low, high)), [(0, 9)])
    ranks = {rank: trace(loss, rows) for rank, loss in losses.items()}
    shares = [share(rank, number, factor) for (rank, number), factor in factors.items()]
    return lines_with_factors(
        Traces(tier="structure", step=0, ranks=ranks, single=whole), "head", shares
    )


def summed(out, low, high):
    return (out - WANTED[low:high]).square().sum()


COUNTS = {0: 4.0, 1: 6.0}


def by_counts(rank):
    return lambda out, low, high, number: summed(out, low, high) / COUNTS[rank]


def test_the_number_that_each_rank_divides_by():
    factors = {(r, n): 9 / COUNTS[r] for r in (0, 1) for n in (0, 1)}
    (found,) = found_with({r: by_counts(r) for r in (0, 1)}, factors)
    assert [line.function for line in (one.mine for one in found.lines)] == ["div"]
    assert numbers_in(found.by[0]) == {4.0: [(0, 0), (0, 1)], 6.0: [(1, 0), (1, 1)]}
    assert found.right == pytest.approx(9)
    assert not found.just


def test_no_line_where_one_share_has_another_factor_than_its_number_makes():
    factors = {(0, 0): 9 / 4, (0, 1): 9 / 4, (1, 0): 9 / 6, (1, 1): 9 / 5}
    assert not found_with({r: by_counts(r) for r in (0, 1)}, factors)


def test_no_line_where_a_share_has_no_factor_or_none_at_all():
    assert not found_with({r: by_counts(r) for r in (0, 1)}, {(0, 0): 9 / 4, (1, 0): None})
    assert not found_with({r: by_counts(r) for r in (0, 1)}, {(0, 0): 9 / 4, (1, 0): 0.0})


def test_what_a_mean_is_taken_over_is_a_number_too():
    def mean(out, low, high, number):
        return F.mse_loss(out, WANTED[low:high])

    (found,) = found_with({0: mean}, {(0, 0): 9 / 2, (0, 1): 9 / 3})
    assert (found.lines[0].at, found.lines[0].divides) == (None, True)
    assert found.by[0] == {(0, 0): 8.0, (0, 1): 12.0}
    assert found.right == pytest.approx(36)


def test_a_mean_of_targets_is_of_those_that_are_not_ignored():
    def mean(out, low, high, number):
        target = torch.tensor([1, -100, 2, 3])[: high - low]
        return F.cross_entropy(out, target)

    (found,) = found_with({0: mean}, {(0, 0): 1.0, (0, 1): 0.5})
    assert found.by[0] == {(0, 0): 1.0, (0, 1): 2.0}


def test_two_lines_together_where_neither_does_alone():
    def mean_times_rows(out, low, high, number):
        return ((out - WANTED[low:high]).square().sum() / (7, 4)[number]) * (2, 3)[number]

    (found,) = found_with({0: mean_times_rows}, {(0, 0): 2 / 7, (0, 1): 3 / 4})
    assert [line.mine.function for line in found.lines] == ["div", "mul"]
    assert found.right is None
    assert [list(by.values()) for by in found.by] == [[7.0, 4.0], [2.0, 3.0]]


def test_weights_are_held_against_those_of_the_single_process():
    def weighed(scale):
        def loss(out, low, high, number):
            return ((out - WANTED[low:high]) * (WEIGHTS[low:high] * scale[number])).sum()

        return loss

    (found,) = found_with(
        {0: weighed((0.5, 2.0))},
        {(0, 0): 1.5, (0, 1): 6.0},
        single=lambda out, low, high, number: ((out - WANTED) * WEIGHTS).sum(),
    )
    assert found.lines[0].beside
    assert [*found.by[0].values()] == pytest.approx([0.5, 2.0])


def test_one_factor_everywhere_is_that_of_a_line_that_the_single_process_has_not():
    def third(out, low, high, number):
        return summed(out, low, high) / 9 / 3

    factors = {(0, 0): 1 / 3, (0, 1): 1 / 3}
    in_nines = {"single": lambda out, low, high, number: summed(out, low, high) / 9}
    (found,) = found_with({0: third}, factors, **in_nines)
    assert found.just
    assert [*found.by[0].values()] == [3.0, 3.0]


def test_all_lines_of_one_factor_that_is_none_of_theirs():
    def loss(out, low, high, number):
        return summed(out, low, high) * 3 / 10

    (found,) = found_with({0: loss}, {(0, 0): 2.7, (0, 1): 2.7})
    assert not found.just
    assert [line.by for line in found.lines] == [3.0, 10.0]


def test_nothing_is_said_where_one_factor_is_right_or_the_single_process_has_the_number():
    def loss(out, low, high, number):
        return summed(out, low, high) / 3

    assert not found_with({0: loss}, {(0, 0): 1.0, (0, 1): 1.0})
    alike = {"single": lambda out, low, high, number: summed(out, low, high) / 3}
    assert not found_with({0: loss}, {(0, 0): 1 / 3, (0, 1): 1 / 3}, **alike)


def test_a_line_that_runs_twice_with_other_numbers_tells_nothing():
    def loss(out, low, high, number):
        return sum(summed(out, low, high) * w for w in (2.0 + number, 5.0))

    assert not found_with({0: loss}, {(0, 0): 2.0, (0, 1): 3.0})


def test_only_what_is_made_of_the_outputs_that_are_weighed():
    """A module with two outputs, each divided by a number of its own."""
    calls, outputs = [], []
    with Computations(lambda: ((), 0)) as computations:
        for part, scale in enumerate((4.0, 5.0)):
            out = (X[part : part + 2].clone().requires_grad_() * 1.5).sin()
            (out.sum() / scale).exp()
            calls.append(Call(module="head", number=0, part=part, operation=0, operation_back=0,
                              recomputed=False))  # fmt: skip
            outputs.append(out.detach())
    mine = Trace(calls=tuple(calls), outputs=tuple(outputs), gradients=(None, None), sources={},
                 computed=computations.computed())  # fmt: skip
    one = trace(lambda out, low, high, number: summed(out, low, high), [(0, 9)])
    traces = Traces(tier="structure", step=0, ranks={0: mine, 1: mine}, single=one)
    for part, scale in enumerate((4.0, 5.0)):
        shares = [replace(share(rank, 0, 1 / scale), part=part) for rank in (0, 1)]
        (found,) = lines_with_factors(traces, "head", shares)
        assert [line.by for line in found.lines] == [scale]


def told_of(*numbers, just=False):
    lines = tuple(SimpleNamespace(divides=divides, by=by) for divides, by in numbers)
    by = tuple({(0, 0): by, (1, 0): by} for _, by in numbers)
    return FactorLines(lines=lines, by=by, just=just)


def test_a_division_by_a_count_of_the_whole_batch_is_none_of_the_fault():
    found = told_of((True, 47.0), (False, 47.0), (True, 3.0))
    kept = _but_for(found, [47.0, 12.0])
    assert [(line.divides, line.by) for line in kept.lines] == [(False, 47.0), (True, 3.0)]
    assert len(kept.by) == 2
    assert _but_for(told_of((True, 47.0)), [47.0]).lines == ()
    assert len(_but_for(told_of((True, 47.0), just=True), [47.0]).lines) == 1  # it divides twice


@pytest.mark.parametrize(("scale", "num"), [(1.0, 0), (0.5, 1)])
def test_of_one_factor_everywhere_weights_that_are_there_too_are_not_listed(scale, num):
    def weighed(out, low, high, number):
        return ((out - WANTED[low:high]) * (WEIGHTS[low:high] * scale)).sum()

    found = found_with(
        {0: weighed},
        {(0, 0): 0.25, (0, 1): 0.25},
        single=lambda out, low, high, number: ((out - WANTED) * WEIGHTS).sum(),
    )
    assert [line.by for one in found for line in one.lines] == [pytest.approx(scale)] * num


def of_calls(*losses):
    """One loss for each call of a rank."""
    return lambda out, low, high, number: losses[number](out, low, high)


def test_numbers_that_a_gradient_passes_are_no_weights():
    """A temperature that is learnt, and weights that are."""

    def learnt(scale):
        def loss(out, low, high):
            t = torch.full((), math.log(scale), dtype=torch.float64, requires_grad=True)
            w = (WEIGHTS[low:high] * scale).clone().requires_grad_()
            return (out - WANTED[low:high]).sum() * t.exp() + (out * w.clone()).sum()

        return loss

    def whole(out, low, high, number):
        return (out * WEIGHTS).sum()

    found = found_with({0: of_calls(learnt(2.0), learnt(3.0))}, {(0, 0): 2.0, (0, 1): 3.0},
                       single=whole)  # fmt: skip
    assert found == []


def test_a_number_divided_by_what_is_on_the_way_is_no_factor():
    def over(number):
        return lambda out, low, high: torch.div(torch.tensor(number).double(), out).sum()

    assert found_with({0: of_calls(over(2.0), over(3.0))}, {(0, 0): 1 / 2, (0, 1): 1 / 3}) == []


def test_a_mean_with_weights_of_classes_divides_by_a_number_that_is_not_told():
    def mean(out, low, high, number):
        return F.cross_entropy(out, torch.arange(high - low), weight=torch.ones(4).double())

    assert found_with({0: mean}, {(0, 0): 1 / 2, (0, 1): 1 / 3}) == []


def test_weights_that_are_one_number_in_some_calls_only_are_not_put_together():
    """Of one row it is multiplied by 3, of two by half of what stands there."""
    rows, column = ((0, 1), (1, 3)), WEIGHTS[:, :1]

    def loss(out, low, high, number):
        weights = (torch.full((1, 1), 3.0).double(), column[low:high] * 0.5)[number]
        return ((out - WANTED[low:high]) * weights).sum()

    def whole(out, low, high, number):
        return ((out - WANTED) * column).sum()

    factors = {(0, 0): 3.0, (0, 1): 0.5}
    assert found_with({0: loss}, factors, single=whole, rows=rows) == []


def test_weights_where_there_are_none_have_no_factor():
    mine, its = torch.tensor([2.0, 4.0, 1.0]), torch.tensor([1.0, 2.0, 0.0])
    size, places = torch.Size([3]), (torch.arange(3), torch.arange(3))
    assert [*_one_factor(mine, size, its, size, places)] == []
    assert [*_one_factor(mine * its.bool(), size, its, size, places)] == [2.0]


@pytest.fixture
def told_by(monkeypatch):
    """with_the_factors_line of a diagnosis, where a line that divides by 6 was found."""
    made_at = (("", ""), ("", ""))
    mine = SimpleNamespace(line="/x/a.py:3", code="loss / n", part="", made_at=made_at)
    line = Scaling(mine=mine, at=1, divides=True, by=6.0)

    def told(diagnosis, factors, *, predicts=True, counts=None, terms=(), ddp=0):
        shares = [share(rank, 0, f) for rank, f in enumerate(factors)]
        by = {(rank, 0): 6.0 for rank, _ in enumerate(factors)}
        look = SimpleNamespace(terms=terms)
        for name, value in {
            "looked_by_rows": lambda case: look,
            "traces_looked_at": lambda case: "traces",
            "shares_at_the_loss": lambda look: ("head", shares),
            "shares_of_term": lambda look, term: ("head", shares),
            "row_weights": lambda shares, rows: "weights",
            "predicts": lambda case, weights: predicts,
            "lines_with_other_numbers": lambda *_: [],
            "lines_with_factors": lambda *_: [FactorLines(lines=(line,), by=(by,), right=9.0)],
        }.items():
            monkeypatch.setattr(words, name, value)
        spec = SimpleNamespace(facts=SimpleNamespace(num_rows=4))
        case = SimpleNamespace(
            record=SimpleNamespace(spec=spec, ranks={0: SimpleNamespace(ddp=ddp)}),
            reference=SimpleNamespace(counts=counts or {"loss": 5.0}),
        )
        return words.with_the_factors_line(case, diagnosis).because

    return told


def diagnosis(kind, **more):
    return Diagnosis(cause="c", kind=kind, because=("b",), **more)


def test_what_is_told_of_gradients_has_to_be_what_these_factors_make(told_by):
    for kind, num in (("loss_weights", 2), ("micro_batches", 1), ("forward", 1)):
        assert len(told_by(diagnosis(kind), [2.0, 3.0], predicts=False)) == num
    assert len(told_by(diagnosis("micro_batches"), [2.0, 3.0])) == 2


@pytest.mark.parametrize(("ddp", "words"), [
    (0, "; were it 9 in all, each factor there were 1"),
    (3, "; were it 3 in all, each factor there were 3, and DDP divides by 3 later"),
])  # fmt: skip
def test_which_number_were_right_is_told_by_what_ddp_divides_by(told_by, ddp, words):
    said = told_by(diagnosis("loss_weights"), [2.0, 3.0], ddp=ddp)
    assert [text.endswith(words) for text in said] == [True, False]


def test_a_line_comes_first_unless_what_follows_the_loss_multiplies_too(told_by):
    first, then = told_by(diagnosis("factor", factor="2"), [2.0, 2.0])
    assert (first[:14], then) == ("on the way to ", "b")
    first, then = told_by(diagnosis("factor", factor="1/2"), [2.0, 2.0])
    assert (first, then[:31]) == ("b", "what follows the loss multiplie")
    assert "divides by 6 (were it 3, the gradient were right)" in then


def test_a_division_by_the_count_of_another_term_is_told_where_the_own_were_right(told_by):
    """Else the line is on the other term's way."""
    counts = {"a": 6.0, "b": 5.0}
    assert len(told_by(diagnosis("factor", factor="2"), [2.0, 2.0], counts=counts)) == 1
    of_b = diagnosis("term_factor", factor="5/6", term="b")
    assert len(told_by(of_b, [5 / 6, 5 / 6], counts=counts, terms=("a", "b"))) == 2
    of_b = diagnosis("term_factor", factor="3", term="b")
    assert len(told_by(of_b, [3.0, 3.0], counts=counts, terms=("a", "b"))) == 1
    of_a = diagnosis("term_factor", factor="2", term="a")
    assert len(told_by(of_a, [2.0, 2.0], counts=counts, terms=("a", "b"))) == 1


def mixed(share):
    def loss(out, low, high, number):
        return share * summed(out, low, high) + (1 - share) * out.sum()

    return loss


def other_numbers(losses, factors, *, single=None, rows=((0, 2), (2, 5))):
    whole = trace(single or mixed(0.8), [(0, 9)])
    ranks = {rank: trace(loss, rows) for rank, loss in losses.items()}
    shares = [share(rank, number, factor) for (rank, number), factor in factors.items()]
    traces = Traces(tier="structure", step=0, ranks=ranks, single=whole)
    return [(one.mine.mine.part or one.mine.mine.code, round(one.mine.by, 9), one.there, one.ranks)
            for one in lines_with_other_numbers(traces, "head", shares)]  # fmt: skip


EACH = [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_line_that_multiplies_by_another_number_than_the_same_line_there():
    losses = {0: mixed(0.2), 1: mixed(0.2)}
    found = other_numbers(losses, dict.fromkeys(EACH, 0.25))
    assert found == [("share * summed(out, low, high)", 0.2, 0.8, (0, 1))]
    assert other_numbers(losses, dict.fromkeys(EACH, 0.5)) == []
    assert other_numbers(losses, dict.fromkeys(EACH, 1.0)) == []
    assert other_numbers(losses, {**dict.fromkeys(EACH, 0.25), (1, 1): 0.5}) == [
        ("share * summed(out, low, high)", 0.2, 0.8, (0,))
    ]
    right = other_numbers({0: mixed(0.2), 1: mixed(0.8)}, dict.fromkeys(EACH, 0.25))
    assert [ranks for *_, ranks in right] == [(0,)]


def divided(by):
    return lambda out, low, high, number: summed(out, low, high) / by


def test_a_line_that_divides_by_another_number():
    found = other_numbers({0: divided(8)}, {(0, 0): 0.5}, single=divided(4))
    assert found == [("summed(out, low, high) / by", 8.0, 4.0, (0,))]
    assert other_numbers({0: divided(8)}, {(0, 0): 2.0}, single=divided(4)) == []
    assert other_numbers({0: divided(8)}, {(0, 0): 0.5}, single=summed_of) == []


def summed_of(out, low, high, number):
    return summed(out, low, high)


def test_of_the_same_line_it_is_said_what_it_multiplies_by_there():
    mine = Scaling(mine=line_of_code("loss * share"), at=1, divides=False, by=0.2)
    one = OtherNumber(mine=mine, there=0.8, factor=0.25, ranks=(1, 3))
    assert words._of_another_number(one) == (
        "1/4 times is what this line makes of it: a.py:1 `loss * share` multiplies by 1/5 on rank "
        "1, 3, and in the single process by 4/5"
    )
    divides = replace(one, mine=replace(mine, divides=True, by=8.0), there=2.0)
    assert "divides by 8 on rank 1, 3, and in the single process by 2" in (
        words._of_another_number(divides)
    )


def line_of_code(code):
    return Computation(function="mul", line="a.py:1", code=code, takes=(0, "0.2"),
                       made_at=(("", ""),) * 2)  # fmt: skip


def test_of_lines_that_multiply_by_several_numbers_none_is_told():
    def each(by):
        return lambda out, low, high, number: by[number] * summed(out, low, high)

    whole = {0: 0.8, 1: 0.4}
    assert other_numbers({0: each({0: 0.2, 1: 0.2})}, dict.fromkeys([(0, 0), (0, 1)], 0.25),
                         single=each({0: 0.8})) != []  # fmt: skip
    assert other_numbers({0: each({0: 0.2, 1: 0.3})}, dict.fromkeys([(0, 0), (0, 1)], 0.25),
                         single=each(whole)) == []  # fmt: skip


def test_a_line_with_the_same_number_is_none():
    assert other_numbers({0: mixed(0.8)}, {(0, 0): 1.0}, single=mixed(0.8)) == []


def test_a_line_that_the_single_process_runs_with_several_numbers_tells_nothing():
    def of(numbers):
        def loss(out, low, high, number):
            return sum(by * out.square().sum() for by in numbers)

        return loss

    assert other_numbers({0: of((0.2,))}, {(0, 0): 0.25}, single=of((0.8,))) != []
    assert other_numbers({0: of((0.2,))}, {(0, 0): 0.25}, single=of((0.8, 0.4))) == []


ROWS = torch.rand(9, generator=G, dtype=torch.float64) + 0.5


def row_by_row(own):
    """A loss of rows, each times its weight; of the weights those that `own` gives."""

    def loss(out, low, high, number):
        return weighed_rows((out - WANTED[low:high]).square().sum(1), own(low, high))

    return loss


def weighed_rows(losses, weights):
    return (losses * weights).sum()


def rows_found(start, factor, *, rows=((6, 7), (7, 8))):
    right, odd = row_by_row(lambda low, high: ROWS[low:high]), row_by_row(
        lambda low, high: ROWS[start + low - 6 : start + high - 6])  # fmt: skip
    factors = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): factor[0], (1, 1): factor[1]}
    single = row_by_row(lambda low, high: ROWS)
    return found_with({0: right, 1: odd}, factors, single=single, rows=rows)


def test_the_weight_of_one_row_alone_is_held_against_that_of_its_row():
    ratios = [float(ROWS[4] / ROWS[6]), float(ROWS[5] / ROWS[7])]
    (found,) = rows_found(4, ratios)
    assert found.lines[0].beside
    assert [*found.by[0].values()] == pytest.approx([1.0, 1.0, *ratios])
    (key, line) = found.odd
    assert (key, line.theirs, line.mine.part) == ((1, 0), (4, 6), "losses * weights")
    assert not rows_found(4, ratios[::-1])


def test_one_row_that_has_its_own_weight_tells_no_other():
    assert not rows_found(6, [2.0, 3.0])


def test_which_of_there_a_weight_is_and_how_it_is_made_in_words(monkeypatch):
    ratios = [float(ROWS[4] / ROWS[6]), float(ROWS[5] / ROWS[7])]
    (found,) = rows_found(4, ratios)
    asked = []

    def made(case, rank, number):
        asked.append((rank, number))
        return ["made there"]

    monkeypatch.setattr(words, "made_in_words", made)
    assert words._of_the_odd(None, found) == [
        "on rank 1 in call 0 it is element 4 of the single process's, beside what stands at 6 "
        "there",
        "made there",
    ]
    assert asked == [(1, found.odd[1].mine.takes[1])]
    assert words._of_the_odd(None, replace(found, odd=None)) == []
    line = replace(found.odd[1], theirs=())
    assert words._of_the_odd(None, replace(found, odd=((1, 0), line))) == ["made there"]
