"""Where elements of a value stand in the single process's, also what stands there twice."""

from __future__ import annotations

import pytest
import torch
from sumgrad.diagnose.modules.values.numbers import Numbers

WHOLE = torch.randn(6, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
TWICE = WHOLE.clone()
TWICE[4] = TWICE[1]  # one row once more
ALL = torch.arange(WHOLE.numel()).reshape(WHOLE.shape)


def places(value, whole=TWICE):
    found = Numbers([whole]).places(value, 0)
    return None if found is None else dict(zip(*(t.tolist() for t in found), strict=True))


def expected(cut):
    return dict(enumerate(ALL[cut].reshape(-1).tolist()))


@pytest.mark.parametrize(
    "cut", [(slice(0, 3), slice(0, 5)), (slice(1, 4), slice(2, 4)), (slice(3, 6), slice(0, 2))]
)
def test_what_stands_there_twice_is_told_by_the_others_of_a_slice(cut):
    assert places(TWICE[cut]) == expected(cut)


def test_of_rows_in_another_order_only_what_stands_there_once_is_told():
    found = places(TWICE[[2, 1, 0]])
    assert found == {**{i: 10 + i for i in range(5)}, **{10 + i: i for i in range(5)}}


def test_a_value_of_fewer_dimensions_is_no_slice():
    assert places(TWICE[:3].reshape(-1)) == {
        **{i: i for i in range(5)}, **{i: i for i in range(10, 15)}
    }  # fmt: skip


def test_what_would_be_another_number_in_the_slice_is_none():
    value = TWICE[0:3].clone()
    value[1] = TWICE[1].flip(0)  # its numbers are there, elsewhere
    assert places(value) == {**{i: i for i in range(5)}, **{i: i for i in range(10, 15)}}


def test_infinite_numbers_are_the_same_where_both_are():
    whole = TWICE.clone()
    whole[:, 0] = -torch.inf
    assert places(whole[0:3], whole) == expected((slice(0, 3), slice(0, 5)))
    assert places(WHOLE[:2] + 1, TWICE) is None


@pytest.mark.parametrize(("order", "rows", "at"), [
    ([0, 1, 2, 0, 2, 1], [0, 1], 0),  # each of them stands there twice, and so only once
    ([0, 1, 2, 0, 2, 1], [1, 0], None),
    ([0, 1, 0, 1], [0, 1], None),  # which of the two it is no one knows
    ([0, 1, 0, 1], [1, 0], 1),
])  # fmt: skip
def test_of_numbers_that_all_stand_there_several_times_the_only_slice_tells(order, rows, at):
    found = places(WHOLE[rows], WHOLE[order])
    assert found == (None if at is None else {i: 5 * at + i for i in range(10)})
