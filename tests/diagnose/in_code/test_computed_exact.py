"""Lines that compute with one thing of the single process's and another beside it, found by value.

Both sides are what a user's lines really did, recorded as in a run: in one process over all rows,
and on a rank over its own.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.in_code import computed
from sumgrad.diagnose.explainers.by_modules.in_code import lines as by_lines
from sumgrad.diagnose.explainers.by_modules.in_code.computed import (
    _argument,
    _differs,
    _in_words,
    _sent_from,
)
from sumgrad.diagnose.modules.in_code.computed_otherwise import (
    Difference,
    _differ,
    computed_otherwise,
)
from sumgrad.diagnose.modules.in_code.lines import Lines
from sumgrad.record.computed import (
    computed_as_json,
    computed_as_tensors,
    computed_from,
    computed_together,
)
from sumgrad.subjects.program.watched.computations import Computations
from torch.nn import functional as F

G = torch.Generator().manual_seed(5)
X = torch.randn(6, 5, generator=G, dtype=torch.float64)
LABELS = torch.tensor([1, 4, 0, 2, 3, 3])
MASK = torch.tensor([1, 1, 0, 1, 0, 1], dtype=torch.bool)
OWN = slice(2, 5)


def recorded(function, *given):
    with Computations(lambda: ((), 0)) as computations:
        function(*given)
    return computations.computed()


def first(on_rank, alone):
    return next(computed_otherwise(0, on_rank, alone), None)


def centred(x, mean):
    return (x - mean) / 0.3


def token_loss(x, labels):
    return F.cross_entropy(x, labels, reduction="sum")


def picked(x, labels):
    return F.log_softmax(x, -1).gather(-1, labels[:, None])


def masked(x, mask):
    return (x.exp() * mask[:, None]).sum()


def scaled(x, scale):
    return x.exp() * scale


@pytest.mark.parametrize(
    ("function", "rank", "whole", "says"),
    [
        (centred, X[OWN].mean(0), X.mean(0), ("sub", 1, None, 5, 5)),
        (centred, X.mean(0) * 7 / 9, X.mean(0), ("sub", 1, 7 / 9, 5, 5)),
        (token_loss, LABELS[OWN] + 1, LABELS, ("cross_entropy", 1, None, 3, 3)),
        (token_loss, torch.tensor([0, -100, 3]), LABELS, ("cross_entropy", 1, None, 1, 3)),
        (picked, torch.tensor([0, 2, 1]), LABELS, ("gather", 2, None, 1, 3)),
        (masked, MASK[:3], MASK, ("mul", 1, None, 1, 3)),
        (scaled, 3.0, 1.5, ("mul", 1, 2.0, 1, 1)),
        (scaled, torch.tensor(3.0), torch.tensor(1.5), ("mul", 1, 2.0, 1, 1)),
        (scaled, X[OWN] * 0, X, ("mul", 1, 0.0, 15, 15)),
        (masked, X[OWN, 0] * 2, X[:, 0], ("mul", 1, 2.0, 3, 3)),
    ],
)
def test_what_is_another(function, rank, whole, says):
    found = first(recorded(function, X[OWN], rank), recorded(function, X, whole))
    assert found is not None
    assert (found.mine.function, found.at, found.how.num, found.how.of) == (*says[:2], *says[3:])
    assert found.how.factor == (says[2] if says[2] is None else pytest.approx(says[2], rel=1e-12))
    assert found.mine.line == found.its.line
    assert "test_computed_exact.py:" in found.mine.line


@pytest.mark.parametrize(
    ("function", "rank", "whole"),
    [
        (centred, X.mean(0), X.mean(0)),
        (centred, X.mean(0) * (1 + 1e-13), X.mean(0)),  # a rounding
        (token_loss, LABELS[OWN], LABELS),
        (picked, LABELS[OWN], LABELS),
        (masked, MASK[OWN], MASK),
        (scaled, 1.5, 1.5),
        (scaled, torch.tensor(1.5), 1.5),
    ],
)
def test_what_is_the_same(function, rank, whole):
    assert first(recorded(function, X[OWN], rank), recorded(function, X, whole)) is None


def test_a_weight_of_classes_is_no_target():
    def weighed(x, labels, w):
        return F.cross_entropy(x, labels, weight=w, reduction="sum")

    w = torch.rand(5, generator=G, dtype=torch.float64)
    whole = recorded(weighed, X, LABELS, w)
    assert first(recorded(weighed, X[OWN], LABELS[OWN], w), whole) is None
    found = first(recorded(weighed, X[OWN], LABELS[OWN] + 1, w), whole)
    assert (found.at, found.how.num, found.how.of) == (1, 3, 3)


def test_targets_of_images():
    x = torch.randn(4, 4, 3, generator=G, dtype=torch.float64)  # as many classes as rows
    labels = torch.randint(4, (4, 3), generator=G)
    whole = recorded(token_loss, x, labels)
    assert first(recorded(token_loss, x[1:3], labels[1:3]), whole) is None
    other = labels[1:3].clone()
    other[0, 2] = (other[0, 2] + 1) % 4
    found = first(recorded(token_loss, x[1:3], other), whole)
    assert (found.at, found.how.num, found.how.of) == (1, 1, 6)


def test_heads_and_masks_of_attention():
    def attend(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = torch.randn(3, 2, 4, 6, 5, generator=G, dtype=torch.float64)
    mask = torch.rand(2, 1, 6, 6, generator=G) > 0.4
    mask |= torch.eye(6, dtype=torch.bool)
    whole = recorded(attend, q, k, v, mask)
    own, heads = slice(2, 6), slice(1, 3)
    right = (q[:, heads, own], k[:, heads], v[:, heads], mask[:, :, own])
    assert first(recorded(attend, *right), whole) is None
    order = torch.randperm(6, generator=G)  # keys in another order, as balanced shards have them
    mixed = (right[0], right[1][:, :, order], right[2][:, :, order], right[3][..., order])
    assert first(recorded(attend, *mixed), whole) is None
    ring = (right[0], right[1][:, :, :3], right[2][:, :, :3], right[3][..., :3])
    assert first(recorded(attend, *ring), whole) is None

    found = first(recorded(attend, right[0], k[:, :2], *right[2:]), whole)
    assert (found.at, found.how.num, found.how.of, found.how.elsewhere) == (1, 4, 4, True)
    other = mask.clone()
    other[1, 0, 3] = ~other[1, 0, 3]
    other[1, 0, 3, 3] = True
    found = first(recorded(attend, *right[:3], other[:, :, own]), whole)
    assert (found.at, found.how.num, found.how.of) == (3, 1, 8)


def test_targets_and_lengths_of_ctc_are_those_of_the_row():
    def aligned(logits, said, frames, signs):
        return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), said, frames, signs)

    logits = torch.randn(4, 9, 6, generator=G, dtype=torch.float64)
    said = torch.tensor([[1, 2, 3], [2, 2, 0], [4, 1, 5], [3, 0, 0]])
    frames, signs = torch.tensor([9, 7, 9, 8]), torch.tensor([3, 2, 3, 1])
    whole = recorded(aligned, logits, said, frames, signs)
    own = [3, 1]  # rows in another order, targets cut to the longest of them
    right = [logits[own], said[own, :2], frames[own], signs[own]]
    assert first(recorded(aligned, *right), whole) is None
    for at, wrong, num in ((1, said[[1, 3], :2], 2), (2, torch.tensor([9, 7]), 1),
                           (3, torch.tensor([1, 1]), 1)):  # fmt: skip
        found = first(recorded(aligned, *right[:at], wrong, *right[at + 1 :]), whole)
        assert (found.at, found.how.num, found.how.of) == (at, num, 2)


def test_a_vector_beside_a_square_is_broadcast():
    def weighed(x, w):
        return w * x

    w = torch.randn(10, generator=G, dtype=torch.float64)
    whole = torch.randn(11, 10, generator=G, dtype=torch.float64)
    own = whole[3:8, :5]  # five rows of five columns
    assert first(recorded(weighed, own, w[:5]), recorded(weighed, whole, w)) is None
    found = first(recorded(weighed, own, w[5:]), recorded(weighed, whole, w))
    assert (found.at, found.how.num, found.how.of) == (0, 5, 5)


def test_where_the_two_parts_stand_is_told():
    """The element beside, not only one of the same tensor: rows in another order are other rows."""
    order = torch.tensor([2, 4, 3])
    found = first(recorded(token_loss, X[OWN], LABELS[order]), recorded(token_loss, X, LABELS))
    assert (found.how.num, found.how.of, found.how.now, found.how.was) == (2, 3, 3.0, 2.0)


def test_which_line_made_it():
    def own(x):
        mean = x.mean(0)
        return centred(x, mean)

    line, code = first(recorded(own, X[OWN]), recorded(own, X)).mine.made_at[1]
    assert code == "mean = x.mean(0)"
    assert line.rpartition(":")[0] == __file__


@pytest.mark.parametrize(
    "values",
    [
        torch.full((6, 5), 0.25, dtype=torch.float64),  # one number is found anywhere
        torch.arange(30, dtype=torch.float64).reshape(6, 5),  # and so are whole numbers
        torch.randn(6, 5, generator=G),  # other roundings are other numbers in float32
    ],
)
def test_numbers_that_tell_nothing(values):
    on_rank, whole = (recorded(scaled, values[rows].log(), n) for rows, n in ((OWN, 3.0), (..., 2)))
    if values.is_floating_point() and values.dtype == torch.float64 and values.unique().numel() > 1:
        on_rank, whole = (recorded(lambda x, n: x * n, values[rows], n)
                          for rows, n in ((OWN, 3.0), (slice(None), 2.0)))  # fmt: skip
    assert first(on_rank, whole) is None


def test_only_all_of_it_is_the_same_tensor():
    """One row that is another, and nothing beside it is accused."""
    other = X[OWN].clone()
    other[0] += 1
    assert first(recorded(scaled, other, 3.0), recorded(scaled, X, 1.5)) is None


def test_other_words_may_put_numbers_together_in_another_order():
    def apart(x):
        return (x * 3.0) * 0.5

    def at_once(x):
        return x * 1.5

    def by_parts(x, a, b):
        return x * (a / b)

    def one_by_one(x, a, b):
        return x * a / b

    assert first(recorded(apart, X[OWN]), recorded(at_once, X)) is None
    w = torch.arange(1.0, 6.0, dtype=torch.float64)
    assert first(recorded(by_parts, X[OWN], w, 3), recorded(one_by_one, X, w, 3)) is None


def test_what_is_added_may_be_a_part():
    def plus(x, y):
        return x + y

    assert first(recorded(plus, X[OWN], X[OWN] / 2), recorded(plus, X, X)) is None
    assert first(recorded(plus, X[OWN], 1e-3), recorded(plus, X, 1e-5)).how.now == 1e-3
    with_graph = X.clone().requires_grad_()
    found = first(recorded(plus, with_graph[OWN], 0 * X[OWN]), recorded(plus, with_graph, X))
    assert (found.at, found.how.factor, found.how.num) == (1, 0, 15)  # a mask, or a bias
    assert "zero, and there it is not (for one: " in _differs(found, found.how, "")
    own = (X[OWN] / 2).requires_grad_()
    assert first(recorded(plus, with_graph[OWN], own), recorded(plus, with_graph, X)) is None


@pytest.mark.parametrize(("off", "told"), [(0.0, False), (0.1, True)])
def test_what_ranks_add_up_later_is_a_part(monkeypatch, off, told):
    """And so is all that is made of it."""

    def score(pairs, outside):
        inside = pairs.sum(1)
        gain = inside - outside
        return gain - outside.exp()

    pairs = torch.randn(3, 4, generator=G, dtype=torch.float64)
    outside = torch.tensor([1.5, 2.75, 0.5], dtype=torch.float64)
    parts = [pairs[:, :1], pairs[:, 1:] + off]
    ranks = [recorded(score, part, outside) for part in parts]
    traces = SimpleNamespace(
        ranks={r: SimpleNamespace(computed=c, calls=()) for r, c in enumerate(ranks)},
        single=SimpleNamespace(computed=recorded(score, pairs, outside), params={}),
    )
    held = Lines(traces, [("dp", [(0, 1)])], 1e-8)
    monkeypatch.setattr(computed, "known_lines", lambda case: held)
    monkeypatch.setattr(by_lines, "known_lines", lambda case: held)
    monkeypatch.setattr(computed, "looked", lambda case: None)
    spec = SimpleNamespace(tiers={"structure": "float64"})
    case = SimpleNamespace(traces=traces, tier="structure", record=SimpleNamespace(spec=spec))
    assert bool(computed._lines_that_differ(case)) == told


def by_share(x, share):
    return x.square() * share


@pytest.mark.parametrize(
    ("shares", "whole", "told"),
    [((1.0, 0.5), 1.5, False), ((1.0, 0.5), 1.25, True), ((1.5, 0.0), 1.5, False)],
)
def test_a_number_of_which_each_rank_has_a_share_is_no_other_number(
    monkeypatch, shares, whole, told
):
    ranks = {r: SimpleNamespace(computed=recorded(by_share, X, s)) for r, s in enumerate(shares)}
    monkeypatch.setattr(computed, "axis_groups", lambda case: [("dp", [(2, 3)]), ("tp", [(0, 1)])])
    single = SimpleNamespace(computed=recorded(by_share, X, whole))
    case = SimpleNamespace(traces=SimpleNamespace(ranks=ranks, single=single))
    found = first(ranks[1].computed, single.computed)
    assert computed._is_a_share(case, found) != told
    assert not computed._is_a_share(SimpleNamespace(traces=None), found)
    del ranks[0].computed
    ranks[0].computed = recorded(lambda x, share: x / share, X, shares[0])
    assert not computed._is_a_share(case, found)


def test_of_several_calls_the_same_one_has_the_other_shares(monkeypatch):
    def twice(x, shares):
        return [x.square() * share for share in shares]

    shares = ((1.0, 2.0), (0.5, 1.0))
    ranks = {r: SimpleNamespace(computed=recorded(twice, X, s)) for r, s in enumerate(shares)}
    monkeypatch.setattr(computed, "axis_groups", lambda case: [("dp", [(0, 1)])])
    single = SimpleNamespace(computed=recorded(twice, X, (1.5, 3.0)))
    case = SimpleNamespace(traces=SimpleNamespace(ranks=ranks, single=single))
    found = [*computed_otherwise(1, ranks[1].computed, single.computed)]
    assert [computed._is_a_share(case, one) for one in found] == [True, True]
    ranks[0].computed = recorded(twice, X, (1.0, 1.0))
    assert [computed._is_a_share(case, one) for one in found] == [True, False]


def test_what_is_divided_by_a_share_is_another(monkeypatch):
    def by_count(x, count):
        return x.square() / count

    ranks = {r: SimpleNamespace(computed=recorded(by_count, X, c)) for r, c in enumerate((2, 3))}
    monkeypatch.setattr(computed, "axis_groups", lambda case: [("dp", [(0, 1)])])
    single = SimpleNamespace(computed=recorded(by_count, X, 5))
    found = first(ranks[1].computed, single.computed)
    traces = SimpleNamespace(ranks=ranks, single=single)
    assert not computed._is_a_share(SimpleNamespace(traces=traces), found)


def test_what_belongs_elsewhere_is_no_part():
    """As positions that are counted from the start of the own stretch."""

    def plus(x, places):
        return x + places

    places = torch.randn(6, 5, generator=G, dtype=torch.float64)
    found = first(recorded(plus, X[OWN], places[:3]), recorded(plus, X, places))
    assert found.how.elsewhere
    assert (found.at, found.how.num, found.how.of) == (1, 15, 15)
    assert first(recorded(plus, X[OWN], places[OWN]), recorded(plus, X, places)) is None

    def plus_waves(x, places):
        waves = places.sin()  # another line's, and no sum of summands before
        return x + waves

    found = first(recorded(plus_waves, X[OWN], places[:3]), recorded(plus_waves, X, places))
    assert (found.mine.function, found.at, found.how.elsewhere) == ("add", 1, True)


def test_one_line_that_is_called_twice():
    """It is the same as one of the single process's calls: then it is that one."""

    def twice(x, a, b):
        scaled(x, a)
        return scaled(x, b)

    whole = recorded(twice, X, 1.5, 2.5)
    assert first(recorded(twice, X[OWN], 2.5, 1.5), whole) is None
    assert first(recorded(twice, X[OWN], 1.5, 4.0), whole).how.now == 4.0


def test_classes_in_another_order_are_the_same_targets():
    """In-batch candidates, the own ones first."""
    x = torch.randn(6, 6, generator=G, dtype=torch.float64)
    labels = torch.arange(6)
    order = torch.tensor([2, 3, 4, 0, 1, 5])
    whole = recorded(token_loss, x, labels)
    assert first(recorded(token_loss, x[OWN][:, order], torch.arange(3)), whole) is None
    found = first(recorded(token_loss, x[OWN][:, order], torch.tensor([0, 2, 2])), whole)
    assert (found.at, found.how.num, found.how.of, found.how.now) == (1, 1, 3, 4.0)
    whole = recorded(picked, x, labels)
    cut = recorded(lambda x, y: F.log_softmax(x, -1)[:, 1:4].gather(-1, y[:, None]),
                   x[OWN], torch.tensor([1, 2, 0]))  # fmt: skip
    assert first(cut, whole) is None  # of a cut vocabulary nothing is told


def test_files_and_several_runs():
    one, two = recorded(scaled, X, 1.5), recorded(centred, X, X.mean(0))
    both = computed_together([one, two])
    assert [c.function for c in both.computations] == ["exp", "mul", "sub", "div"]
    again = computed_from(computed_as_json(both), computed_as_tensors(both))
    assert again.computations == both.computations
    assert again.with_graph == both.with_graph
    assert [g.keys() for g in again.gradients] == [g.keys() for g in both.gradients]
    assert first(recorded(centred, X[OWN], X[0]), again).mine.function == "sub"


def test_what_torchs_own_modules_compute_is_not_recorded():
    norm, linear = torch.nn.LayerNorm(5).double(), torch.nn.Linear(5, 5).double()
    assert not recorded(lambda x: linear(norm(x)), X).computations
    assert [c.function for c in recorded(lambda x: linear(norm(x)) * 2, X).computations] == ["mul"]


def test_what_was_changed_in_place_is_another_value():
    def in_place(x):
        y = x.clone()
        first_time = y * 2
        y.numpy()[:] += 1  # as a collective: no torch function sees it
        return first_time, y * 2

    _, first_time, _, second = recorded(in_place, X).computations
    assert first_time.takes[0] != second.takes[0]


def test_another_formula_may_call_the_same_function():
    """With other words, and nothing of it there: it is no more than a hint."""

    def mine(x, y):
        return (x * y).sum(-1)

    def other(x, y):
        return -(x * y).sum(-1)

    y = torch.randn(6, 5, generator=G, dtype=torch.float64)
    whole = recorded(mine, X, y)
    assert first(recorded(mine, X[OWN], y[OWN] + 1), whole).is_sure
    assert not first(recorded(other, X[OWN], y[OWN].exp()), whole).is_sure
    some = y[OWN].clone()
    some[1] += 1
    assert first(recorded(other, X[OWN], some), whole).is_sure
    assert first(recorded(other, X[OWN], y[:3]), whole).is_sure  # what belongs elsewhere


@pytest.mark.parametrize(("size", "factor"), [(1, 2.0), (3, None)])
def test_one_element_of_several_has_no_factor_of_all(size, factor):
    got, wanted = (torch.tensor([n], dtype=torch.float64) for n in (2.0, 1.0))
    how = _differ(got, wanted, torch.tensor([0]), size)
    assert (how.factor, how.now, how.was) == (factor, 2.0, 1.0)


def minus(values, returns):
    return (values - returns).square().sum()


@pytest.mark.parametrize("function", [minus, F.mse_loss])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_shapes_that_are_broadcast_over_each_other_are_told(function):
    alone = recorded(function, X[:, 0], X[:, 1])
    found = first(recorded(function, X[OWN, :1], X[OWN, 1]), alone)
    assert found is not None
    assert found.how.spread == (torch.Size((3, 1)), torch.Size((3,)))
    assert found.is_sure
    assert first(recorded(function, X[OWN, :1], X[OWN, 1:2]), alone) is None


def test_of_what_all_rows_share_and_is_the_same_none_is_another():
    """What is multiplied by it stands at other places: a table does not differ for that."""
    table = torch.arange(1.0, 6.0, dtype=torch.float64).cos()
    moved = X[OWN].roll(1, 1)
    assert first(recorded(scaled, moved.log(), table), recorded(scaled, X.log(), table)) is None


def test_pairs_of_all_with_all_are_meant_where_the_same_line_has_them_alone():
    def away(x, mean):
        return x - mean

    mean = X.sin()
    mine = recorded(lambda x, m: away(x[:, 0], m[:, None, 0]), X[OWN], mean[OWN])
    each = recorded(lambda x, m: away(x[:, 0], m[:, 0]), X, mean)
    both = recorded(lambda x, m: (away(x[:, 0], m[:, 0]), away(x[:, None], m[None])), X, mean)
    assert first(mine, each).how.spread == ((3,), (3, 1))
    assert first(mine, both) is None


def weighed(x, labels, weight):
    return F.binary_cross_entropy_with_logits(x, labels, reduction="sum", weight=weight)


def test_an_argument_that_is_given_by_name_is_called_that():
    target, weight = X.sigmoid(), torch.linspace(0.5, 2, 6, dtype=torch.float64)[:, None] * X.exp()
    mine = recorded(weighed, X[OWN], target[OWN], weight[OWN] * 1.5)
    one = first(mine, recorded(weighed, X, target, weight))
    assert _argument(one) == "argument weight of `binary_cross_entropy_with_logits`"
    mine = recorded(scaled, X[OWN], 0.25)
    assert _argument(first(mine, recorded(scaled, X, 0.5))) == "second argument of `mul`"


def test_names_of_arguments_are_written_and_read():
    mine = recorded(weighed, X, X.sigmoid(), X.exp())
    back = computed_from(computed_as_json(mine), computed_as_tensors(mine))
    assert [c.keys for c in back.computations] == [c.keys for c in mine.computations]
    assert "weight" in back.computations[-1].keys


def windows_loss(x, tags, number, parts):
    """Labels are looked up, cut into micro-batches and flattened."""
    labels = tags[number].masked_fill(tags[number] < 0, -100)
    for mine, own in zip(x.split(parts), labels[:, None].split(parts), strict=True):
        F.cross_entropy(mine, own.flatten(), reduction="sum")


def case_of(on_rank):
    return SimpleNamespace(traces=SimpleNamespace(ranks={0: SimpleNamespace(computed=on_rank)}))


def test_what_is_only_cut_and_shaped_was_made_by_the_line_that_looked_it_up():
    """And of the times that the line runs the wrong one is told."""
    whole = recorded(windows_loss, X, LABELS, torch.arange(6), 2)
    on_rank = recorded(windows_loss, X, LABELS, torch.tensor([0, 1, 2, 0, 4, 5]), 2)
    found = first(on_rank, whole)
    said = _in_words(case_of(on_rank), [found])
    assert "test_computed_exact.py" in said
    assert (
        "`labels = tags[number].masked_fill(tags[number] < 0, -100)` gives, and the first" in said
    )
    assert said.endswith(
        "do not belong together: in at least 1 of 2 elements that could be compared (the second of "
        "the 3 times that it runs; for one: 1 stands beside what has 2 there) on rank 0"
    )


def test_a_line_that_runs_once_has_no_number():
    on_rank = recorded(token_loss, X[OWN], LABELS[OWN] + 1)
    said = _in_words(case_of(on_rank), [first(on_rank, recorded(token_loss, X, LABELS))])
    assert said.endswith(
        "do not belong together: in 3 of 3 elements that could be compared (for one: 1 stands "
        "beside what has 0 there) on rank 0"
    )


@pytest.mark.parametrize(("factor", "of", "words"), [
    (0.5, 1, "1/2 times what it is there"),
    (-0.0376884, 1, "another (-0.01 where there it is 0.25)"),
    (-0.0376884, 4, "-0.0376884 times what it is there"),
])  # fmt: skip
def test_one_number_is_no_multiple_of_another_but_by_a_fraction(factor, of, words):
    how = Difference(factor=factor, num=of, of=of, now=-0.01, was=0.25)
    mine = SimpleNamespace(function="sub", takes=(0, 1))
    assert _differs(SimpleNamespace(mine=mine, at=1, how=how), how, "") == words


def test_the_same_numbers_in_another_order_do_not_belong_together():
    """As token losses by cluster beside weights by token: neither is another."""
    weights = torch.tensor([3.0, 1.0, 2.0, 3.0, 1.0, 2.0]).double()
    whole = recorded(masked, X, weights)
    turned = first(recorded(masked, X[:3], weights[[2, 0, 1]]), whole)
    assert turned.how.elsewhere
    other = first(recorded(masked, X[:3], torch.tensor([3.0, 1.0, 2.5]).double()), whole)
    assert not other.how.elsewhere
    flags = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).double()
    seen = first(recorded(masked, X[:3], flags[[1, 0, 2]]), recorded(masked, X, flags))
    assert not seen.how.elsewhere  # of two values any are in another order


def turned(x, table):
    return x * table


def test_what_belongs_to_another_call_of_the_same_line():
    """As the table of one kind of layer in the layers of another: the other call takes nothing of
    what is handed to this one, and so is not meant."""
    tables = [torch.randn(1, 5, generator=G).double() for _ in range(2)]
    layers = [X, X.flip(1) + 2]
    own = [x[OWN] for x in layers]

    def every(given, of):
        for x, table in zip(given, of, strict=True):
            turned(x, table)

    whole = recorded(every, layers, tables)
    found = first(recorded(every, own, tables[:1] * 2), whole)
    assert (found.place, found.at, found.how.elsewhere, found.how.num) == (1, 1, True, 5)
    assert first(recorded(every, own, tables), whole) is None
    many = tables[0].exp().expand(2, 12, 5).clone()
    both = recorded(every, [*layers, torch.cat(layers)], [*tables, many])
    assert first(recorded(every, own, tables[:1] * 2), both) is None  # or of the third: who knows


def test_ranks_where_two_do_not_belong_together_are_told_alike():
    weights = torch.tensor([3.0, 1.0, 2.0, 3.0, 1.0, 2.0]).double()
    whole = recorded(masked, X, weights)
    ranks = [recorded(masked, X[:3], weights[[2, 0, 1]]),
             recorded(masked, X[3:], torch.tensor([3.0, 3.0, 2.0]).double())]  # fmt: skip
    found = [next(computed_otherwise(i, rank, whole)) for i, rank in enumerate(ranks)]
    held = {i: SimpleNamespace(computed=rank) for i, rank in enumerate(ranks)}
    case = SimpleNamespace(traces=SimpleNamespace(ranks=held))
    assert [one.how.elsewhere for one in found] == [True, False]
    alone, both = _in_words(case, found[:1]), _in_words(case, found)
    assert "do not belong together, though the numbers of each are there: in 3 of 3" in alone
    assert "though" not in both
    assert both.endswith(
        "do not belong together: in 3 of 3 elements that could be compared (for one: 2 stands "
        "beside what has 3 there) on rank 0; in at least 1 of 3 elements that could be compared "
        "(for one: 3 stands beside what has 1 there) on rank 1"
    )
    several = replace(found[0], how=replace(found[0].how, several=True))
    assert _in_words(case, [several]).endswith(
        "though the numbers of each are there: they stand together in no call there on rank 0"
    )


def mixed(x, first, mix):
    return mix[0] * x + mix[1] * first


def test_another_call_on_the_same_line_is_no_measure_where_the_call_itself_runs():
    """Handed the stream as what came first, too: what it mixes in is no other number."""
    mix, embedded = (torch.tensor([0.9, 0.4]).double(), X.exp())
    alone = recorded(mixed, X, embedded, mix)
    assert first(recorded(mixed, X[OWN], X[OWN], mix), alone) is None
    found = first(recorded(mixed, X[OWN], embedded[OWN], mix * 2), alone)
    assert (found.mine.function, found.at, found.how.factor) == ("mul", 0, 2.0)


def test_numbers_that_come_again_are_held_against_each_of_their_places():
    """As rows of a table that several examples take: which of them it is, what stands beside it
    says. And what is zero is none of them more than another."""
    table = torch.randn(5, 4, generator=G, dtype=torch.float64)
    order, beside = torch.tensor([0, 1, 0, 2, 0, 3]), torch.randn(6, 4, generator=G).double()
    alone = recorded(times, table[order], beside)
    for own in ([4, 2], [2, 4], [0, 2, 4]):
        assert first(recorded(times, table[order[own]], beside[own]), alone) is None
    assert first(recorded(times, table[order[[1, 3]]], beside[[1, 2]]), alone).how.num == 4
    holes = X.clone()
    holes[:, 3] = 0
    weights = torch.randn(6, 5, generator=G, dtype=torch.float64)
    other = weights[:3].clone()
    other[:, 3] = 7.0
    assert first(recorded(times, holes[:3], other), recorded(times, holes, weights)) is None


def times(x, y):
    return x * y


def test_numbers_of_another_value_are_others_and_not_put_together_otherwise():
    """A largest of some is a number that the single process has, and not where it takes one."""
    scores = X[:, None].expand(6, 4, 5).clone() + torch.randn(6, 4, 1, generator=G).double()
    alone = recorded(minus_top, scores, scores.amax(1))
    told = first(recorded(minus_top, scores, scores[:, :2].amax(1)), alone)
    assert (told.mine.function, told.at, told.how.elsewhere) == ("sub", 1, False)


def minus_top(scores, top):
    return (scores - top[:, None]).exp()


def products(x, y, mask):
    if mask is not None:
        x, y = x * mask, y * mask
    return x * y


def test_what_another_line_takes_is_no_measure_where_the_line_itself_runs():
    """As a product of what is not masked, whose one side another line puts beside the mask."""
    y = torch.randn(6, 5, generator=G).double()
    mask = torch.ones(6, 1).double()
    mask[3] = 0
    whole = recorded(products, X, y, mask)
    assert first(recorded(products, X[OWN], y[OWN], None), whole) is None


def beside_all(x, y, pairs):
    if pairs:
        from_first = x[:, :, None] - (x - x[:, :1])[:, None, :]
        return from_first + y[:, None, :]
    return x + y[:, 1:2]


def test_a_formula_of_other_dimensions_is_no_measure():
    """As of what is added to each, and to each pair there: the first of a pair are the same."""
    y = torch.randn(6, 5, generator=G).double()
    whole = recorded(beside_all, X, y, True)
    assert first(recorded(beside_all, X[OWN], y[OWN], False), whole) is None


def sending(h, running):
    return torch.cat([h, running[:, None]], 1)


def weighing(got, x):
    running = got[:, 2]
    return x * running[:, None]


@pytest.mark.parametrize("is_sent", [True, False])
def test_which_line_of_another_rank_made_what_it_is_a_part_of(is_sent):
    h, running = torch.randn(3, 2, generator=G).double(), torch.rand(3, generator=G).double()
    sender = recorded(sending, h, running if is_sent else running + 1)
    got = torch.cat([h, running[:, None]], 1)
    mine = recorded(weighing, got, X[OWN])
    both = torch.cat([torch.randn(6, 2, generator=G).double(), 0.5 + X[:, :1].abs()], 1)
    found = first(mine, recorded(weighing, both, X))
    case = SimpleNamespace(traces=SimpleNamespace(
        ranks={0: SimpleNamespace(computed=mine), 1: SimpleNamespace(computed=sender)}
    ))  # fmt: skip
    (text,) = _sent_from(case, found) or [""]
    assert text.startswith("its numbers on rank 0 come from rank 1 at ") == is_sent
    assert text.endswith("`return torch.cat([h, running[:, None]], 1)`") == is_sent
    assert _sent_from(SimpleNamespace(traces=None), found) == []
    own = first(recorded(scaled, X[OWN], X[0, 0]), recorded(scaled, X, X[1, 1]))
    assert own is None or _sent_from(case, own) == []  # nothing was cut


def handed_on(got, x):
    running = got.double()[:, 2]
    return x * running[:, None]


def test_what_only_hands_a_tensor_on_is_no_way_without_end():
    """A cast gives the very tensor that it takes, where nothing is to be done; so it is the first
    line that gives what came from elsewhere, and is made of itself."""
    running = torch.rand(3, 1, generator=G).double()
    got = torch.cat([torch.randn(3, 2, generator=G).double(), running], 1)
    both = torch.cat([torch.randn(6, 2, generator=G).double(), 0.5 + X[:, :1].abs()], 1)
    mine = recorded(handed_on, got, X[OWN])
    assert any({*c.gives} & {*c.takes} for c in mine.computations)
    found = first(mine, recorded(handed_on, both, X))
    traces = SimpleNamespace(ranks={0: SimpleNamespace(computed=mine)})
    assert _sent_from(SimpleNamespace(traces=traces), found) == []


def added_up(first, *others):
    for other in others:
        first = first + other
    return first


def test_of_a_sum_one_by_one_a_rank_may_have_some():
    """Each summand stands beside the sum of those before it, and not beside one of them."""
    terms = [torch.randn(6, 5, generator=G).double() for _ in range(4)]
    there = recorded(added_up, *terms)
    assert first(recorded(added_up, terms[2][OWN], terms[3][OWN]), there) is None
    found = first(recorded(added_up, terms[0][OWN], terms[1][:3]), there)
    assert found.how.elsewhere  # it is of other rows


def test_a_tensor_is_not_held_against_a_number():
    def plus(x, y):
        return x + y

    def both(x, y):
        plus(x, 0)
        return plus(x, y)

    mine = recorded(plus, X[OWN], X[OWN].sin() * (X[OWN] > 0))
    assert first(mine, recorded(plus, X, 0)) is None
    assert first(mine, recorded(both, X, X.sin())) is None
