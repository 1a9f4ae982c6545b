"""A rank's vectors among the single process's: what counts as padding, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sumgrad.diagnose.modules.values import matching
from sumgrad.diagnose.modules.values.matching import (
    add_up,
    compare_gradient,
    has_zeros_beyond,
    match,
)

WANTED = torch.arange(1.0, 19.0, dtype=torch.float64).reshape(6, 3)
FILLER = torch.tensor([[0.5, 0.25, -3.0]], dtype=torch.float64)


@pytest.mark.parametrize(("got", "here"), [
    ([WANTED[1:3]], [True, True]),
    ([WANTED[1:3], 0 * FILLER], [True, True, True]),  # zeros
    ([WANTED[1:3], FILLER, FILLER], [True, True, True, True]),  # what a layer makes of zeros
    ([WANTED[1:3], FILLER, FILLER * (1 + 1e-15)], [True, True, True, True]),  # up to rounding
    ([WANTED[1:3], FILLER], [True, True, False]),  # one alone is wrong
    ([WANTED[1:3], FILLER, 2 * FILLER], [True, True, False, False]),  # and so are different ones
    ([FILLER, FILLER], [False, False]),  # nothing is there: a wrong output of equal rows
])  # fmt: skip
def test_what_counts_as_padding(got, here):
    found = match(torch.cat(got), WANTED, 1e-9)
    assert found is not None
    assert found.here.tolist() == here
    assert not (found.empty & found.found.any(1)).any()


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float64).min, -torch.inf, 1e12])
def test_beside_a_mask_not_everything_is_near(mask):
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    masked = scores.masked_fill(torch.ones(4, 4).triu(1) > 0, mask)
    lost = scores + torch.zeros(4, 4).double().masked_fill(torch.ones(4, 4).triu(1) > 0, mask)
    for one in (masked, lost):
        found = match(lost, one, 1e-8)
        assert torch.equal(found.found, torch.eye(4) > 0)
        assert not match(lost + 0.1 * (lost.abs() < 10), one, 1e-8).found.any()
    assert not match(scores, masked, 1e-8).found[:3].any()


def test_large_numbers_that_are_no_masks_tell():
    large = WANTED * 1e9
    assert torch.equal(
        match(large[[4, 2]], large, 1e-9).found.nonzero()[:, 1], torch.tensor([4, 2])
    )
    steps = torch.cat([WANTED[:3], WANTED[3:] * 1e10])  # huge, and numbers all the same
    near = steps[5:] * (1 + 1e-6)
    assert not match(near, steps, 1e-9).found.any()
    close = torch.cat([WANTED[:3] * 1e5, 1e9 + WANTED[3:] * 1e5])  # not so far above the rest
    assert match(close[4:5], close, 1e-9).found.nonzero()[:, 1].tolist() == [4]


@pytest.mark.parametrize(
    ("rounding", "got", "right"),
    [
        (0.0, 0.3, False),
        (1e-18, 0.3, False),  # no factor of what is rounding alone
        (1e-18, 2e-18, True),
        (1e-4, 3e-4, True),  # small, and a number all the same
    ],
)
def test_a_gradient_of_rounding_has_no_factor(rounding, got, right):
    where = match(WANTED, WANTED, 1e-9)
    wanted = torch.ones_like(WANTED)
    wanted[2] = torch.tensor([1.0, -2.0, 0.5]) * rounding
    mine = wanted.clone()
    mine[2] = torch.tensor([1.0, -2.0, 0.5]) * got
    found = compare_gradient(mine, wanted, where, 1e-9)
    assert found.right.tolist() == [True, True, right, True, True, True]


@pytest.mark.parametrize(("got", "factor"), [
    (6.0, None),  # three times the one, or twice the other
    (3.0, 1.0),  # it is the other, so it is right
])  # fmt: skip
def test_of_two_that_it_may_be_no_factor_is_guessed(got, factor):
    twice = torch.cat([WANTED, WANTED[:1]])  # two tokens of which the module gives the same
    wanted = torch.tensor([[2.0], [5.0], [7.0], [9.0], [11.0], [13.0], [3.0]]).double()
    where = match(WANTED[:1], twice, 1e-9)
    where = replace(where, columns=(0, 1))
    (found,) = compare_gradient(torch.tensor([[got]]).double(), wanted, where, 1e-9).factors
    assert found.isnan() if factor is None else found == factor


def test_two_that_have_one_gradient_have_one_factor():
    twice = torch.cat([WANTED, WANTED[:1]])
    wanted = torch.tensor([[2.0], [5.0], [7.0], [9.0], [11.0], [13.0], [2.0]]).double()
    where = replace(match(WANTED[:1], twice, 1e-9), columns=(0, 1))
    (found,) = compare_gradient(torch.tensor([[6.0]]).double(), wanted, where, 1e-9).factors
    assert found == 3.0


def test_parts_add_up_to_multiples_of_what_is_wanted_and_zeros_of_nobodys_do_not_count():
    generator = torch.Generator().manual_seed(5)
    wanted = torch.randn(3, 4, generator=generator).double()
    held = torch.cat([wanted[[2, 0]], torch.zeros(1, 4).double()])  # a row of padding
    where = match(held, wanted, 1e-9)
    own = torch.randn(3, 4, generator=generator).double()
    gradient = torch.cat([2 * wanted[[2, 0]], torch.ones(1, 4).double()])
    assert add_up([own, gradient - own], wanted, where, 1e-9)
    gradient[1] += 1e-3
    assert not add_up([own, gradient - own], wanted, where, 1e-9)
    assert not add_up([own, own[:2]], wanted, where, 1e-9)


WIDE = torch.arange(1.0, 25.0, dtype=torch.float64).reshape(3, 8)
ZEROS = torch.zeros(3, 2, dtype=torch.float64)


@pytest.mark.parametrize(("got", "meant"), [
    ([ZEROS, WIDE[:, :4]], True),  # before what it begins with
    ([WIDE[:, 5:], ZEROS], True),  # after what it ends with
    ([ZEROS[:2], WIDE[1:, :4]], True),  # of some rows
    ([ZEROS, WIDE[:, 1:4]], False),  # before what stands in the middle: its neighbour is missing
    ([WIDE[:, 4:7], ZEROS], False),
    ([WIDE[:, :4]], False),  # no zeros
    ([WIDE[:, 4:]], False),
    ([ZEROS, WIDE[:, :4] + 0.5], False),  # another's
    ([ZEROS, WIDE[:, 5:], ZEROS[:, :1]], False),  # on both sides of a part
    ([ZEROS, WIDE[:, :3], ZEROS[:, :1]], False),
    ([ZEROS, WIDE[:, :4], WIDE[:, 5:6]], False),
    ([ZEROS, ZEROS], False),  # nothing
])  # fmt: skip
def test_zeros_beyond_the_end_may_be_meant(got, meant):
    rows = torch.cat(got, dim=1)
    assert has_zeros_beyond(rows, WIDE, 1e-9) is meant
    padded = torch.cat([ZEROS[:, :1], WIDE, ZEROS[:, :1]], dim=1)  # as the single process may be
    assert has_zeros_beyond(rows, padded, 1e-9) is meant


def test_of_too_many_pairs_zeros_beyond_are_not_looked_for(monkeypatch):
    rows = torch.cat([ZEROS, WIDE[:, :4]], dim=1)
    for most, told in ((9, True), (8, False)):
        monkeypatch.setattr(matching, "MAX_PAIRS", most)
        assert has_zeros_beyond(rows, WIDE, 1e-9) is told
