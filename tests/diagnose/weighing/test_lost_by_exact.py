"""The line that leaves tokens out whose gradient is lost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.weighing.weights import _left_out_by
from sumgrad.diagnose.modules.in_code.lost_by import line_that_is_zero_with, line_that_leaves_out
from sumgrad.diagnose.modules.where.loss_weights import Share
from sumgrad.record.computed import Computation, Computed

FACTORS = {0: 3.0, 1: 0.0, 2: 3.0, 4: 0.0, 5: 3.0}  # of 2 x 3 vectors; of number 3 nothing is known
MASK = torch.tensor([[True, False, True], [False, False, True]])


def share(rank=0, number=0, factors=FACTORS):
    rows = {at: at // 3 for at in factors}
    return Share(rank=rank, number=number, rows=(0, 1), factor=None, by_row={}, shape=(2, 3, 7),
                 vectors=factors, row_of=rows)  # fmt: skip


def rank(*values, path="/x/a.py", functions=("lt",), first=3):
    """Lines one after the other, each of which gives the next of the values."""
    made = tuple(
        Computation(
            function=functions[at % len(functions)], line=f"{path}:{first + at}", code=f"m{at}",
            takes=(), gives=(at,), made_at=(), site=f"{path}:{first + at}:0",
            within=f"{path}:1 pick",
        )
        for at in range(len(values))
    )  # fmt: skip
    return SimpleNamespace(computed=Computed(computations=made, values=tuple(values)))


def left_out(shares, *ranks):
    traces = SimpleNamespace(ranks=dict(enumerate(ranks)))
    found = line_that_leaves_out(traces, shares)
    said = _left_out_by(SimpleNamespace(traces=traces), shares)
    assert (found is None) == (said == [])
    if found is not None:
        assert said == [
            f"what a.py:{found.line.rpartition(':')[2]} `{found.code}` in pick gives "
            f"is zero, or False, for those that are lost, and not for any other"
        ]
    return None if found is None else found.code  # fmt: skip


@pytest.mark.parametrize(("mask", "found"), [
    (MASK, "m0"),
    (MASK.flatten(), "m0"),
    (MASK.double() * 1.5, "m0"),
    (~MASK, None),
    (torch.tensor([[True, False, True], [True, False, True]]), "m0"),  # the unknown one may be any
    (torch.tensor([[True, False, True], [False, False, False]]), None),  # one that is not lost
    (torch.tensor([[True, True, True], [False, False, True]]), None),  # one that is
    (MASK[:, :2], None),
    (MASK.to(torch.complex64), None),
])  # fmt: skip
def test_it_gives_zero_for_those_alone_that_are_lost(mask, found):
    assert left_out([share()], rank(mask)) == found


def test_the_first_such_line_of_the_users_is_told():
    assert left_out([share()], rank(~MASK, MASK, MASK * 2.0)) == "m1"
    assert left_out([share()], rank(MASK, path="/y/site-packages/a.py")) is None
    assert left_out([share()], rank(MASK, functions=("module pick",))) is None


def test_it_does_so_in_every_call_in_which_some_are_lost():
    other = share(1, 1, {0: 0.0, 1: 3.0, 2: 0.0})
    theirs = torch.tensor([[False, True, False], [True, True, True]])
    whole = share(1, 2, {0: 3.0, 1: 3.0})
    shares = [share(), other, whole]
    assert left_out(shares, rank(MASK, MASK), rank(MASK, theirs)) == "m1"
    assert left_out(shares, rank(MASK, MASK), rank(MASK, MASK)) is None
    assert left_out(shares, rank(MASK)) is None  # of a rank that left nothing behind


def test_of_one_token_any_line_may_tell():
    assert left_out([share(factors={0: 3.0, 1: 0.0, 2: 3.0})], rank(MASK)) is None
    assert left_out([share(factors={1: 0.0, 4: 0.0, 0: 3.0})], rank(MASK)) is None
    assert left_out([share(factors={0: 3.0, 2: 3.0})], rank(MASK)) is None


GRADIENT = torch.tensor([[0.5, 0.0, -2.0], [0.0, 0.0, 1.0]])


@pytest.mark.parametrize(("value", "gradient", "found"), [
    (MASK, GRADIENT, "m0"),
    (MASK * 3, GRADIENT, "m0"),
    (MASK[:, :, None], GRADIENT[:, :, None].repeat(1, 1, 4), "m0"),
    (MASK[0], GRADIENT[:1].repeat(2, 1), "m0"),
    (MASK.flatten(), GRADIENT, None),
    (~MASK, GRADIENT, None),
    (torch.tensor([[True, False, True], [True, False, True]]), GRADIENT, None),
    (torch.tensor([[True, False, True], [False, False, False]]), GRADIENT, None),
    (torch.ones(2, 3), torch.ones(2, 3), None),
    (torch.zeros(2, 3), torch.zeros(2, 3), None),
    (MASK[None], GRADIENT, None),
])  # fmt: skip
def test_a_line_that_is_zero_where_a_gradient_is(value, gradient, found):
    own = rank(torch.ones(2, 3), value).computed
    told = line_that_is_zero_with(own, gradient)
    assert (None if told is None else told.code) == (found and "m1")
