"""What an argument would have to be for what follows to be right: solved for, and told how."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.in_code.solved import (
    _differs,
    _each,
    _given_there,
    _over,
)
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.diagnose.modules.values.value_states import ValueStates
from sumgrad.diagnose.modules.wanted import solved_back
from sumgrad.diagnose.modules.wanted.how_apart import How, how_apart, is_apart
from sumgrad.diagnose.modules.wanted.inverses import Needed, literal, moved_back, needed, other_way
from sumgrad.diagnose.modules.wanted.keys_needed import keys_needed
from sumgrad.diagnose.modules.wanted.solved_back import SolvedBack
from sumgrad.subjects.program.watched.computations import Computations
from torch.nn import functional as F

G = torch.Generator().manual_seed(7)


def drawn(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


X, W, B = drawn(6, 5), drawn(4, 5), drawn(4)
SQUARE = drawn(5, 5)
POSITIVE = drawn(6, 5).exp()


@pytest.mark.parametrize(
    ("name", "function", "takes"),
    [
        ("add", torch.add, (X, drawn(6, 5))),
        ("sub", torch.sub, (X, drawn(6, 5))),
        ("mul", torch.mul, (X, POSITIVE)),
        ("div", torch.div, (X, POSITIVE)),
        ("rsub", torch.rsub, (X, POSITIVE)),
        ("rdiv", lambda a, b: b / a, (POSITIVE, X)),
        ("exp", torch.exp, (X,)),
        ("log", torch.log, (POSITIVE,)),
        ("tanh", torch.tanh, (X,)),
        ("sqrt", torch.sqrt, (POSITIVE,)),
        ("neg", torch.neg, (X,)),
        ("matmul", torch.matmul, (X, SQUARE)),
        ("linear", F.linear, (X[:, :5] @ SQUARE, SQUARE, drawn(5))),
    ],
)
def test_every_argument_is_solved_for(name, function, takes):
    for at, own in enumerate(takes):
        other = own * 1.25 + 0.1
        wanted = function(*takes[:at], other, *takes[at + 1 :])
        found = needed(name, takes, at, function(*takes), wanted)
        assert found is not None, (name, at)
        torch.testing.assert_close(found.value, other)


def test_a_function_with_an_option_is_not_solved_for():
    a, b = drawn(6, 5), drawn(6, 5)
    assert needed("add", (a, b), 1, torch.add(a, b, alpha=2), a) is None
    assert needed("softmax", (a,), 0, a.softmax(0), a.softmax(0)) is None
    assert needed("cos", (a,), 0, a.cos(), a.sin()) is None
    assert needed("mul", (a, None), 0, a, a) is None
    assert needed("mul", (torch.arange(3), b), 0, b, b) is None
    assert needed("add", (2.0, b), 0, b, b) is None


def test_of_what_is_broadcast_all_copies_have_to_be_one_number():
    scale = drawn(6, 1)
    gave = X * scale
    found = needed("mul", (X, scale), 1, gave, X * scale * 3)
    torch.testing.assert_close(found.value, scale * 3)
    assert found.spare == X.numel() - len(scale)
    assert needed("mul", (X, scale), 1, gave, drawn(6, 5)) is None
    row = drawn(5)
    found = needed("add", (X, row), 1, X + row, X + 2 * row)
    torch.testing.assert_close(found.value, 2 * row)
    assert found.spare == 25


def test_what_a_zero_swallows_is_not_known():
    gate = POSITIVE.clone()
    gate[1] = 0
    found = needed("mul", (X, gate), 0, X * gate, 2 * X * gate)
    assert found.value.isnan().any(1).tolist() == [False, True, *[False] * 4]
    torch.testing.assert_close(found.value[2:], 2 * X[2:])


def test_the_larger_of_two_tells_the_one_that_has_to_be_larger():
    a, floor, other = drawn(6, 5).abs(), torch.ones(6, 5).double(), torch.full((6, 5), 0.5).double()
    gave, wanted = torch.maximum(a, floor), torch.maximum(a, other)
    found = needed("maximum", (a, floor), 1, gave, wanted)
    known = ~found.value.isnan()
    assert torch.equal(known, a < 0.5)
    assert bool((found.value[known] == 0.5).all())
    assert needed("maximum", (a, floor), 0, gave, wanted - 5) is None
    less = needed("minimum", (-a, -floor), 1, -gave, -wanted)
    assert bool((less.value[known] == -0.5).all())


def test_a_matrix_is_solved_for_where_there_is_one_and_only_one():
    x, w = drawn(8, 3), drawn(3, 4)
    found = needed("matmul", (x, w), 1, x @ w, x @ (2 * w))
    torch.testing.assert_close(found.value, 2 * w)
    assert found.spare == (8 - 3) * 4
    assert needed("matmul", (x, w), 1, x @ w, drawn(8, 4)) is None  # no such one
    wide = drawn(2, 3)
    assert needed("matmul", (wide, w), 1, wide @ w, drawn(2, 4)) is None  # more than one
    heads = torch.stack([drawn(3, 3), torch.ones(3, 3).double()])
    v = drawn(2, 3, 4)
    found = needed("matmul", (heads, v), 1, heads @ v, heads @ (3 * v))
    torch.testing.assert_close(found.value[0], 3 * v[0])
    assert bool(found.value[1].isnan().all())
    left = needed("matmul", (w[:, :3], v), 0, w[:, :3] @ v, 2 * (w[:, :3] @ v))
    torch.testing.assert_close(left.value, 2 * w[:, :3])  # one for all
    assert needed("matmul", (X[0], SQUARE), 0, X[0] @ SQUARE, X[0]) is None


def test_a_weight_and_a_bias_of_a_linear():
    gave = F.linear(X, W, B)
    found = needed("linear", (X, W, B), 1, gave, F.linear(X, 2 * W, B))
    torch.testing.assert_close(found.value, 2 * W)
    found = needed("linear", (X, W, B), 2, gave, F.linear(X, W, B + 1))
    torch.testing.assert_close(found.value, B + 1)
    assert found.spare == 5 * 4
    assert needed("linear", (X, W, B), 2, gave, F.linear(X, 2 * W, B)) is None


def test_scores_of_a_softmax_that_have_to_be_masked():
    scores = drawn(2, 6)
    right = scores.clone()
    right[1, 4:] = -torch.inf
    found = needed("softmax", (scores, -1.0), 0, scores.softmax(-1), right.softmax(-1))
    torch.testing.assert_close(found.value, right)
    assert needed("softmax", (scores,), 0, scores.softmax(-1), right.softmax(-1) * 2) is None


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("transpose", ("0", "1")),
        ("permute", ("(1, 0)",)),
        ("flatten", ("0",)),
        ("reshape", ("(3, 10)",)),
        ("unsqueeze", ("dim=1",)),
        ("contiguous", ()),
    ],
)
def test_what_only_moves_is_moved_back(function, words):
    args = [literal(w.rpartition("=")[2]) for w in words]
    gave = getattr(X, function)(*args)
    wanted = gave * 2
    found = moved_back(function, (X, *words), 0, 0, gave, wanted)
    torch.testing.assert_close(found.value, 2 * X)


def test_of_a_part_the_rest_is_not_known():
    words = "(slice(1, 3, None), Ellipsis)"
    found = moved_back("getitem", (X, words), 0, 0, X[1:3], X[1:3] + 1)
    torch.testing.assert_close(found.value[1:3], X[1:3] + 1)
    assert int(found.value.isnan().sum()) == 4 * 5
    q, k = X.chunk(2, 0)
    found = moved_back("chunk", (X, "2", "0"), 0, 1, k, k * 3)
    torch.testing.assert_close(found.value[3:], k * 3)
    assert bool(found.value[:3].isnan().all())
    joined = torch.cat([q, k], 1)
    found = moved_back("cat", (q, k, "dim=1"), 1, 0, joined, joined * 2)
    torch.testing.assert_close(found.value, 2 * k)


def test_an_index_that_is_no_number_is_found_by_value():
    index = torch.tensor([4, 0])
    found = moved_back("index_select", (X, "0", "an object"), 0, 0, X[index], X[index] * 2)
    torch.testing.assert_close(found.value[index], 2 * X[index])
    twice = torch.zeros(6, 5).double()
    assert moved_back("index_select", (twice, "0", "?"), 0, 0, twice[index], twice[index]) is None
    assert moved_back("getitem", (X, "0"), 0, 0, X[0], X) is None  # of another shape


@pytest.mark.parametrize(
    ("name", "takes", "wanted", "words"),
    [
        ("matmul", (SQUARE, X[:5]), X[:5] @ SQUARE, "with its two arguments the other way round"),
        ("matmul", (SQUARE, X[:5]), SQUARE @ X[:5].mT, "with the second of them transposed"),
        ("matmul", (SQUARE, X[:5]), SQUARE.mT @ X[:5], "with the first of them transposed"),
        ("sub", (X, POSITIVE), POSITIVE - X, "with its two arguments the other way round"),
        ("mul", (X, POSITIVE), X / POSITIVE, "with `div` in its place"),
        ("softmax", (X,), X.softmax(0), "over dimension 0"),
        ("cumsum", (X,), X.cumsum(0), "over dimension 0"),
        ("matmul", (SQUARE, X[:5]), drawn(5, 5), ""),
        ("matmul", (SQUARE, X[:5]), torch.zeros(5, 5).double(), ""),
        ("mul", (X, W), X, ""),
        ("flip", (X,), X.flip(0), ""),
    ],
)
def test_the_same_function_in_another_way(name, takes, wanted, words):
    assert other_way(name, takes, wanted) == words


def attended(allowed, scores, values):
    return torch.where(allowed, scores, -torch.inf).softmax(-1) @ values


def test_the_keys_over_which_a_query_has_to_go():
    n = 6
    scores, values = drawn(2, n, n), drawn(2, n, 3)
    at = torch.arange(n)
    back = at[:, None] - at[None]
    wide, right = (back >= 0) & (back <= 3), (back >= 0) & (back <= 2)
    shares = torch.where(wide, scores, -torch.inf).softmax(-1)
    found = keys_needed(scores, shares, values, attended(right, scores, values))
    assert torch.equal(found.needed, right.repeat(2, 1))
    assert found.wrong.tolist() == [*[False] * 3, *[True] * 3] * 2
    assert (
        _over(found)
        == "over other keys in 6 of 12 queries (that at [0, 3], the first, over 1-3 and not 0-3)"
    )
    assert keys_needed(scores, shares, values, drawn(2, n, 3)) is None
    assert keys_needed(scores, shares, values[:, :4], drawn(2, n, 3)) is None
    same = keys_needed(scores, shares, values, shares @ values)
    assert not bool(same.wrong.any())


def test_two_sets_of_keys_that_give_the_same_tell_nothing():
    scores, values = torch.zeros(1, 3).double(), torch.ones(3, 2).double()
    values[2] = 5
    shares = torch.tensor([[1 / 3, 1 / 3, 1 / 3]]).double()
    found = keys_needed(scores, shares, values, values[:1])  # the first, the second, or both
    assert not bool(found.told.any())


HERE, NONE = slice(2, 5), Numbers([])


def recorded(function, *given):
    with Computations(lambda: ((), 0)) as computations:
        function(*(t.clone().requires_grad_() for t in given)).sum().backward()
    return computations.computed()


def solved(mine, there):
    traces = SimpleNamespace(
        ranks={0: SimpleNamespace(computed=mine)}, single=SimpleNamespace(computed=there, params={})
    )
    return SolvedBack(traces, ValueStates(traces, (), 1e-8)).solved(0, lambda _: True)


def ending(x, y):
    return (x * y).cos()


def inner(x, w):
    h = x @ w
    return h.sin()


def whole(x, w):
    h = x @ w
    return ending(x.tanh(), h.sin())


def on_ranks(x, w, scale):
    h = x @ w
    y = h.sin() * scale
    return ending(x.tanh(), y)


def test_on_ranks_alone_a_factor_is_solved_for_from_the_end_that_both_have():
    there = recorded(whole, X, SQUARE)
    scale = torch.full((3, 1), 2.0).double()
    found = solved(recorded(on_ranks, X[HERE], SQUARE, scale), there)
    told = {(one.mine.part, one.at): one for one in found}
    one = told["h.sin() * scale", 1]
    assert one.need.spare == 3 * 5 - 3
    torch.testing.assert_close(one.need.value, torch.ones(3, 1).double())
    assert one.how == How("factor", factors=(pytest.approx(0.5),))
    assert one.end.at.part == "x * y"
    assert one.end.enters


def test_not_all_that_is_wrong_is_asked_for(monkeypatch):
    monkeypatch.setattr(solved_back, "MOST_TRIED", 0)
    scale = torch.full((3, 1), 2.0).double()
    mine = recorded(on_ranks, X[HERE], SQUARE, scale)
    assert solved(mine, recorded(whole, X, SQUARE)) == []


def test_nothing_is_solved_for_where_all_is_right():
    there = recorded(whole, X, SQUARE)
    one = torch.ones(3, 1).double()
    assert solved(recorded(on_ranks, X[HERE], SQUARE, one), there) == []


def repeated(x, w):
    for _ in range(3):
        x = mixed(x, w)
    return x


def mixed(x, w):
    return x + (x @ w).tanh()


def repeated_on_ranks(x, w):
    for _ in range(3):
        x = mixed(x, w * 1)
    return x


def test_the_second_time_is_held_against_the_second_time():
    """Not against the first, for which the sum has to be what is there before it."""
    there = recorded(repeated, X, SQUARE)
    assert solved(recorded(repeated_on_ranks, X[HERE], SQUARE), there) == []
    found = solved(recorded(repeated_on_ranks, X.flip(0), SQUARE * 1.5), there)
    told = {(one.mine.part, one.at): one for one in found}
    assert told["x @ w", 1].how.kind == told["w * 1", 0].how.kind == "factor"
    assert told["w * 1", 0].how.factors == (pytest.approx(2 / 3),)
    assert told["w * 1", 0].need.spare == 5


def later_by_half(x, w):
    for factor in (1.0, 1.5, 1.0):
        x = mixed(x, w * factor)
    return x


def test_what_is_wrong_later_is_held_against_what_is_there_later():
    there = recorded(repeated, X, SQUARE)
    found = solved(recorded(later_by_half, X.flip(0), SQUARE), there)
    told = [one.how for one in found if one.mine.part == "x @ w" and one.at == 1]
    assert told == [How("factor", factors=(pytest.approx(2 / 3),))]


def test_what_the_same_line_takes_there_is_no_news():
    there = recorded(whole, X, SQUARE)
    assert solved(recorded(on_ranks, X[HERE], SQUARE, drawn(3, 5)), there) == []


def case(*given):
    there = recorded(whole, X, SQUARE)
    traces = SimpleNamespace(single=SimpleNamespace(computed=there))
    return SimpleNamespace(traces=traces)


@pytest.mark.parametrize(
    ("how", "is_", "wanted", "words"),
    [
        (How("factor", factors=(0.5,)), X, X / 2, "1/2 times what it is"),
        (How("factor", factors=(0.0,)), X, X * 0, "zero"),
        (How("offset", factors=(-2.0,)), X, X - 2, "2 less everywhere"),
        (How("offset", factors=(0.5,)), X, X + 0.5, "1/2 more everywhere"),
        (How("inverse", factors=(1.0,)), X, 1 / X, "1 divided by what it is"),
        (How("order"), SQUARE, SQUARE.mT, "transposed"),
        (How("order"), X, X.flip(0), "the same numbers in another order"),
        (How("factors", dim=0, factors=(1.0, 2.0, 2.0)), X, X,
         "along its dimension 0 at 0 what it is, at 1-2 2 times what it is"),
    ],
)  # fmt: skip
def test_how_it_has_to_differ_in_words(how, is_, wanted, words):
    mine = SimpleNamespace(takes=(0, "1"))
    one = SimpleNamespace(how=how, is_=is_, need=Needed(value=wanted, spare=0), mine=mine)
    assert _differs(case(), one) == words


def scaled_rows(t):
    return t * torch.tensor([1, 2, 2, 2, 3, 1]).double()[:, None]


def shifted(t):
    return torch.where(torch.arange(30).reshape(6, 5) % 4 == 1, t - 6, t)


def zeroed(t):
    return torch.where(torch.arange(30).reshape(6, 5) == 7, 0.0, t)


@pytest.mark.parametrize(
    ("change", "spare", "how"),
    [
        (lambda t: 2 * t, 0, How("factor", factors=(2.0,))),
        (lambda t: t - 3, 0, How("offset", factors=(-3.0,))),
        (lambda t: 4 / t, 0, How("inverse", factors=(4.0,))),
        (scaled_rows, 0, How("factors", factors=(1.0, 2.0, 2.0, 2.0, 3.0, 1.0))),
        (shifted, 0, How("offset", factors=(-6.0,), some=8)),
        (zeroed, 0, How("zeros")),
        (lambda t: t.roll(1, 0), 0, How("order")),
        (torch.tanh, 0, None),
        (torch.tanh, 30, None),
        (torch.exp, 0, How("there")),
    ],
)
def test_how_a_tensor_has_to_differ(change, spare, how):
    there = Numbers([X.exp()])
    found = how_apart(X, Needed(value=change(X), spare=spare), there)
    if how is None:
        assert found is None
        return
    assert (found.kind, found.some, found.dim) == (how.kind, how.some, how.dim)
    assert found.factors == pytest.approx(how.factors)


@pytest.mark.parametrize(("spare", "kind"), [(0, None), (3, "zeros")])
def test_zeros_that_have_to_be_something_are_told_by_others(spare, kind):
    """What is added up begins with zeros, and whatever is missing may be put there."""
    own = torch.where(torch.arange(6)[:, None] > 2, X, 0.0)
    found = how_apart(own, Needed(value=torch.where(own == 0, X.cos(), own), spare=spare), NONE)
    assert (found and found.kind) == kind


def test_a_line_that_both_run_is_no_cause_if_what_it_takes_is_made_as_there():
    there = recorded(whole, X, SQUARE)
    scale = torch.full((3, 1), 2.0).double()
    parts = {one.mine.part for one in solved(recorded(on_ranks, X[HERE], SQUARE, scale), there)}
    assert parts == {"h.sin() * scale"}
    there = recorded(lambda x, w: ending(x.tanh(), inner(x, w) * 0.5), X, SQUARE)
    mine = recorded(lambda x, w: ending(x.tanh(), inner(x, w)), X[HERE], SQUARE)
    assert solved(mine, there) == []  # what is missing stands behind `h.sin()`


def test_of_few_numbers_only_others_tell_a_factor():
    two = drawn(2)
    assert how_apart(two, Needed(value=2 * two, spare=0), Numbers([])) is None
    assert how_apart(two, Needed(value=2 * two, spare=3), Numbers([])).kind == "factor"
    nothing = Needed(value=torch.full((2,), torch.nan).double(), spare=9)
    assert how_apart(two, nothing, Numbers([])) is None
    assert not is_apart(two, nothing.value)
    assert not is_apart(two, two * (1 + 1e-12))
    assert is_apart(two, torch.tensor([-torch.inf, torch.nan]))


def test_a_power_of_positive_numbers():
    gave = POSITIVE**0.75
    found = needed("pow", (POSITIVE, 0.75), 0, gave, (2 * POSITIVE) ** 0.75)
    torch.testing.assert_close(found.value, 2 * POSITIVE)
    assert needed("pow", (X, 2.0), 0, X**2, 4 * X**2) is None


def test_what_it_has_to_be_is_named_by_the_line_that_gives_it_or_takes_it():
    there = case().traces.single.computed
    gives = next(c for c in there.computations if c.function == "sin").gives[0]
    assert _given_there(case(), gives).endswith("`h.sin()` gives")
    product = next(c for c in there.computations if c.function == "matmul")
    leaf = product.takes[1]
    assert _given_there(case(), leaf).endswith("`h = x @ w` takes as its second argument")
    assert _given_there(case(), 10_000) == "numbers that are there"


def test_elements_that_have_to_be_nothing():
    masked = X.clone()
    masked[1, 2:4] = -torch.inf
    one = SimpleNamespace(how=How("zeros"), is_=X, need=Needed(value=masked, spare=0))
    assert (
        _differs(case(), one)
        == "masked (minus infinity) in 2 of 30 elements (at [1, 2], the first)"
    )
    none = X.clone()
    none[3] = 0
    one = SimpleNamespace(how=How("zeros"), is_=X, need=Needed(value=none, spare=0))
    assert (
        _differs(case(), one) == "zero in 5 of 30 elements where it is not (at [3, 0], the first)"
    )
    one = SimpleNamespace(how=How("zeros"), is_=none, need=Needed(value=X, spare=0))
    assert _differs(case(), one) == (
        f"another in 5 of 30 elements that are zero ({float(X[3, 0]):.6g} at [3, 0], the first)"
    )


def test_many_factors_are_cut():
    assert len([*_each([float(i) + 2 for i in range(9)])]) == 7


def test_what_was_chosen_is_named_before_what_it_was_chosen_from():
    chosen = X.exp()
    several = torch.stack([chosen, chosen - 1.7, chosen - 2.9])
    for values, at in (([several, chosen], 1), ([chosen, several], 0), ([several], 0)):
        found = how_apart(X, Needed(value=chosen, spare=0), Numbers(values))
        assert (found.kind, found.there) == ("there", at)
