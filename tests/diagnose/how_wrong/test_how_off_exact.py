"""In which way a gradient is wrong: columns with factors, in other places, or some of them."""

from __future__ import annotations

from math import isnan, nan
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.backwards.how_it_is_off import (
    _in_words,
    _stands_in_words,
    _zeros_in_words,
    off_at_a_line,
)
from sumgrad.diagnose.modules.how_wrong.how_off import HowOff, how_off, zeros_off

W = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FACTORS = torch.tensor([3.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def test_columns_with_factors_of_their_own():
    how = how_off(W * FACTORS, W)
    assert how.columns == (0, 1, 2, 3)
    assert how.factors == pytest.approx((3.0, 3.0, 0.5, 2.0))
    assert _in_words(how, "on rank 1") == [
        "for one, on rank 1 it is the single process's but for factors by columns: 3 in columns "
        "0-1, 1/2 in columns 2, 2 in columns 3"
    ]


def test_many_factors_are_not_listed():
    w = torch.cat([W, W + 1], 1)
    how = how_off(w * torch.arange(1.0, 9.0, dtype=torch.float64), w)
    assert _in_words(how, "on rank 0") == [
        "for one, on rank 0 each of its columns has a factor of its own"
    ]


def test_columns_in_other_places():
    how = how_off(W[:, [1, 0, 2, 3]] * 2, W)
    assert (how.columns, how.is_moved) == ((1, 0, 2, 3), True)
    assert _in_words(how, "on rank 0") == [
        "for one, on rank 0 its columns are in other places: column 0 what belongs to 1, 1 what "
        "belongs to 0"
    ]


def test_some_columns_wrong():
    got = W.clone()
    got[2, 1] += 1
    how = how_off(got, W)
    assert (how.columns, how.wrong, isnan(how.factors[1])) == ((0, -1, 2, 3), (1,), True)
    assert _in_words(how, "on rank 0") == [
        "for one, on rank 0 columns 1 of 4 are wrong, and columns 0, 2-3 are the single process's "
        "up to one factor"
    ]


def moved(column, to):
    got = 2 * W
    got[:, column] = to
    return got


@pytest.mark.parametrize(("got", "said"), [
    (moved(2, 2 * W[:, 3]), "column 2 what belongs to 3"),
    (moved(2, 2 * W[:, 2] + 2 * W[:, 0]), "column 2 what belongs to 0 beside its own"),
    (torch.cat([moved(2, 0.0)[:, :3], 2 * W[:, 2:3]], 1),
     "column 2 has nothing, 3 what belongs to 2"),
    # The third adds what the second has already.
    (torch.cat([2 * W[:, :1], 2 * W[:, 1:2] + 2 * W[:, :1],
                2 * W[:, 2:3] + 2 * W[:, 1:2] + 2 * W[:, :1], 2 * W[:, 3:]], 1),
     "column 1 what belongs to 0 beside its own, 2 what belongs to 1 beside its own"),
])  # fmt: skip
def test_what_stands_in_columns_that_are_wrong(got, said):
    found = _stands_in_words(got, W, how_off(got, W), "on rank 1")
    assert found == [
        f"for one, on rank 1 some columns have what belongs to others: {said}; the others are "
        f"right up to one factor"
    ]


def test_what_stands_is_told_of_all_wrong_columns_or_of_none():
    for got in (
        moved(2, 2 * W[:, 3] + 1e-3),
        torch.cat([moved(2, 2 * W[:, 3])[:, :3], W[:, :1].exp()], 1),
    ):
        assert _stands_in_words(got, W, how_off(got, W), "on rank 1") == []
    two = W.clone()
    two[:, 3] = two[:, 1]  # which of the two it is cannot be told
    got = two.clone()
    got[:, 0] = two[:, 1]
    how = HowOff(columns=(-1, 1, 2, 3), factors=(nan, 1.0, 1.0, 1.0), wrong=(0,))
    assert _stands_in_words(got, two, how, "on rank 1") == []


def test_a_column_of_nothing_tells_nothing():
    w = W.clone()
    w[:, 2] = 0
    how = how_off(w * FACTORS, w)
    assert how.columns == (0, 1, -1, 3)
    assert "columns 2" not in _in_words(how, "on rank 0")[0]


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (W, W),
        (3 * W, W),  # one factor, which is told elsewhere
        (W[:2] * FACTORS, W[:2]),  # of two vectors it is told by too little
        (W[:, :1] * 2, W[:, :1]),
        (W.sin(), W),
        (W, W[:5]),
        (torch.zeros_like(W), W),
        (W[:, [1, 0, 2, 3]] * FACTORS, W),  # moved, and with several factors: anything
    ],
)
def test_what_is_not_told(got, wanted):
    how = how_off(got, wanted)
    assert how is None
    assert _in_words(how, "on rank 0") == []


def test_columns_that_are_lost_are_wrong_too():
    """And are none of those that are right up to one factor."""
    wanted = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = wanted.clone()
    got[:, 1], got[:, 2] = wanted[:, 1].flip(0), 0.0
    told = how_off(got, wanted)
    assert told is not None
    assert told.wrong == (1, 2)
    assert told.columns == (0, -1, -1, 3)
    moved = torch.cat([W[:, [1, 0, 2]], 0 * W[:, :1]], 1)  # and one of them lost
    assert how_off(moved, W).wrong == (0, 1, 3)
    got[:, 0] = got[:, 3] = 0.0
    assert how_off(got, wanted) is None


def states(beside):
    return SimpleNamespace(states=SimpleNamespace(beside=beside))


def test_of_a_line_wrong_columns_are_not_told():
    """They are those of one call, and others in the next."""
    got, wanted = torch.ones(4, 3).double(), torch.ones(4, 3).double()
    got[0, 1] = 5.0
    assert how_off(got, wanted).wrong == (1,)
    one = SimpleNamespace(rank=0, at=(0,), mine=SimpleNamespace(takes=(7,)))
    lines = states(lambda rank, number: (got, wanted))
    assert off_at_a_line(lines, [one]) == []
    turned = states(lambda rank, number: (wanted * torch.tensor([1.0, 2, 3]), wanted))
    assert off_at_a_line(turned, [one]) != []
    lost = states(lambda rank, number: (with_zeros((1, 1)), W))
    (said,) = off_at_a_line(lost, [one])
    assert "1 of 24 numbers that were compared are zero" in said


def with_zeros(*places):
    mask = torch.ones_like(W)
    for place in places:
        mask[place] = 0
    return W * mask


@pytest.mark.parametrize(("got", "wanted", "said"), [
    (with_zeros((0, 1), (2, 2)) * 3, W,
     "2 of 24 numbers that were compared are zero and should not be"),
    (W, with_zeros((0, 1)), "1 of 24 numbers that were compared should be zero and are not"),
    (with_zeros((0, 1), (2, 2)), with_zeros((5, 3), (2, 2)),
     "1 of 24 numbers that were compared are zero and should not be, and 1 should be zero and are "
     "not"),
    (W * 3, W, None),
    (with_zeros((0, 1)) * FACTORS, W, None),  # others are wrong, too
    (with_zeros((0, 1))[:, :3], W, None),
    (with_zeros(*((i, j) for i in range(6) for j in range(4) if i + j)), W, None),  # one is left
])  # fmt: skip
def test_what_is_zero_and_should_not_be(got, wanted, said):
    told = _zeros_in_words(got, wanted, "on rank 1")
    assert told == ([] if said is None else [
        f"for one, on rank 1 {said}; the others are right up to one factor: look at what takes or "
        f"leaves out numbers (a mask, a clamp, an index)"
    ])  # fmt: skip
    assert (zeros_off(got, wanted) is None) == (said is None)
