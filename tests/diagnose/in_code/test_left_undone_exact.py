"""What the single process computes and no rank does, as it really ran."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sumgrad.diagnose.modules.in_code.left_undone import left_undone, left_unmasked, other_functions
from sumgrad.diagnose.modules.in_code.options import unlike_options
from sumgrad.diagnose.modules.values.numbers import Numbers
from sumgrad.record.computed import Computation, Computed
from sumgrad.subjects.program.watched.computations import Computations

G = torch.Generator().manual_seed(2)
X = torch.randn(6, 5, generator=G, dtype=torch.float64)
W = torch.randn(5, 5, generator=G, dtype=torch.float64)
PARTS = (slice(0, 2), slice(2, 6))


def recorded(step, rows=slice(None)):
    with Computations(lambda: ((), 0)) as computations:
        step(X[rows].clone().requires_grad_()).sum().backward()
    return computations.computed()


def parts(step):
    return [recorded(step, rows) for rows in PARTS]


def unmasked(ranks, step):
    whole = recorded(step)
    return left_unmasked(ranks, whole, Numbers(whole.values))


def whole(x):
    scaled = (x @ W) * 0.37
    return torch.tanh(scaled) + x


def without_a_factor(x):
    scaled = x @ W
    return torch.tanh(scaled) + x


def another_way(x):
    scaled = (0.37 * x) @ W
    return torch.tanh(scaled) + x


def functions(found):
    return [c.function for c in found]


def test_the_first_that_no_rank_has_is_told():
    assert functions(left_undone(parts(without_a_factor), recorded(whole))) == ["mul"]
    assert left_undone(parts(whole), recorded(whole)) == []


def test_what_comes_to_the_same_in_another_way_is_not():
    assert left_undone(parts(another_way), recorded(whole)) == []


def test_what_is_made_of_it_may_be_there_in_part():
    """As of heads that are computed in one call, of which one is wrong."""

    def at_once(x):
        made = ((x * 0.37) @ W)[:, :3]
        return torch.cat([torch.tanh(made) + x[:, :3], x[:, 3:].exp()], 1)

    assert left_undone(parts(at_once), recorded(whole)) == []


def test_one_rank_that_has_it_is_enough():
    ranks = [recorded(without_a_factor, PARTS[0]), recorded(whole)]
    assert left_undone(ranks, recorded(whole)) == []
    some = [recorded(without_a_factor, PARTS[0]), recorded(whole, PARTS[1])]
    assert left_undone(some, recorded(whole)) == []  # it is there in part
    few = [recorded(whole, PARTS[0]), recorded(without_a_factor, PARTS[1])]
    assert left_undone(few, recorded(whole)) == []


def test_where_numbers_were_not_kept_nothing_is_told():
    large = Computation(function="mul", line="f.py:1", code="x * y", made_at=(("", ""),),
                        takes=("a large tensor, number 3",))  # fmt: skip
    ranks = [*parts(without_a_factor), Computed(computations=(large,))]
    assert left_undone(ranks, recorded(whole)) == []
    assert unmasked(ranks, clamped) == []


def clamped(x):
    y = x @ W
    y = y.clamp(max=0.4)
    return y * y


def not_clamped(x):
    y = x @ W
    return y * y


def masked_otherwise(x):
    y = x @ W
    y = torch.where(y > 0.4, 0.4, y)
    return y * y


def test_what_no_rank_clamps_is_told():
    assert functions(unmasked(parts(not_clamped), clamped)) == ["clamp"]
    assert unmasked(parts(clamped), clamped) == []
    assert unmasked(parts(masked_otherwise), clamped) == []


def test_a_clamp_that_changes_nothing_is_not():
    def idle(x):
        y = x @ W
        return y.clamp(max=400.0) * y

    assert unmasked(parts(not_clamped), idle) == []


@pytest.mark.parametrize(("here", "there", "told"), [
    (F.silu, F.gelu, [("silu", "gelu")]),
    (F.gelu, F.gelu, []),
    (lambda x: F.huber_loss(x, 2 * x.detach()), lambda x: F.smooth_l1_loss(x, 2 * x.detach()),
     [("huber_loss", "smooth_l1_loss")]),
    (F.silu, lambda x: F.silu(x) + F.gelu(x), []),  # the rank may lack one: that is left undone
    (torch.tanh, torch.exp, []),  # of no family
])  # fmt: skip
def test_another_function_of_its_kind(here, there, told):
    ranks = parts(lambda x: here(x @ W))
    single = recorded(lambda x: there(x @ W))
    found = [*other_functions(dict(enumerate(ranks)), single, Numbers(single.values))]
    assert {(one.mine.function, one.its.function) for one in found} == {*told}
    assert {one.rank for one in found} == ({0, 1} if told else set())


def test_a_switch_that_no_call_of_the_single_process_has():
    ids = torch.tensor([0, 3, 3, 1])

    def looks(switch):
        return recorded(lambda x: F.embedding(ids, x, scale_grad_by_freq=switch))

    told = [(o.now, o.was) for o in unlike_options(looks(True), looks(False))]
    assert told == [("scale_grad_by_freq=True", "scale_grad_by_freq=False")]
    assert list(unlike_options(looks(False), looks(False))) == []


@pytest.mark.parametrize(("here", "there"), [
    (lambda x: F.dropout(x, 0.0, training=True), lambda x: F.dropout(x, 0.0, training=False)),
    (lambda x: F.softmax(x, dim=1), lambda x: F.softmax(x, dim=0)),
])  # fmt: skip
def test_what_is_no_switch_or_changes_no_number_is_no_option(here, there):
    assert list(unlike_options(recorded(here), recorded(there))) == []
