"""Rows of a gradient that get what ranks gave to rows of other numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from sumgrad.diagnose.explainers.of_others.other_rows import _one_of_each, rows_of_other_numbers
from sumgrad.diagnose.explanation import Left
from sumgrad.diagnose.own_gradients import RowsGiven
from test_lacking_rows_exact import RANKS, TOUCHED, case_of

SLOTS = dict(enumerate(TOUCHED))


def by_slots(sums, rank):
    """The values of all ranks, added in the order in which they stand, under the rank's rows."""
    total = sums[rank].clone()
    for slot, row in enumerate(SLOTS[rank]):
        for other in range(RANKS):
            if other != rank and slot < len(SLOTS[other]):
                total[row] += sums[other, SLOTS[other][slot]]
    return total


def told(held, **more):
    case = case_of(held, **more)
    return [e.diagnosis for e in rows_of_other_numbers(case, Left(()))]


def test_values_that_are_added_by_their_places_are_told():
    (cause,) = told(by_slots)
    assert (cause.kind, cause.standing, cause.ranks) == ("other_rows", "proved", (0, 1, 2))
    assert cause.cause.startswith(
        "rows of w get what ranks gave to rows of other numbers: row 0 of w on rank 0 is row 0 of "
        "backward 1 on rank 0 + row 0 of backward 2 on rank 0 + row 1 of backward 1 on rank 1 + "
    )


def test_rows_that_lack_some_are_no_rows_of_other_numbers():
    def held(sums, rank):
        total = by_slots(sums, rank)
        total[4] = sums[rank, 4]
        return total

    wrong = 0

    def counted(sums, rank):
        nonlocal wrong
        total = held(sums, rank)
        wrong += int(((total - sums.sum(0)).abs().amax(1) > 1e-9).sum())
        return total

    (cause,) = told(counted)
    assert f"; of {wrong} wrong rows on all ranks " in cause.cause
    assert cause.cause.endswith(" lack some or all of their own")


def test_a_right_sum_and_another_number_are_not_told():
    assert told(lambda sums, rank: sums.sum(0)) == []
    assert told(lambda sums, rank: sums.sum(0) + (rank == 1)) == []


def test_rows_that_only_lack_ranks_are_not_told():
    assert told(lambda sums, rank: sums[rank]) == []


def test_nothing_is_told_where_what_ranks_gave_is_not_right_or_not_known():
    assert told(by_slots, keep=False) == []
    wrong = torch.ones(5, 7).double()
    case = case_of(by_slots)
    one = case.record.references["structure"][0]
    odd = replace(one, grads={"w": one.grads["w"] + wrong})
    case.record.references["structure"][0] = odd
    assert list(rows_of_other_numbers(replace(case), Left(()))) == []


def test_one_row_of_another_number_is_too_few():
    def held(sums, rank):
        total = sums.sum(0).clone()
        total[1] += sums[2, 3] if rank == 0 else 0
        return total

    assert told(held) == []


def test_of_equal_rows_none_is_told():
    own = torch.tensor([[[[1.0, 2], [0, 0], [0, 0]]], [[[0, 0], [5, 7], [5, 7]]]]).double()
    got = torch.tensor([[6.0, 9], [0, 0], [0, 0]]).double()
    given = RowsGiven(passes=own, rows=own.sum(1), got=got, wrong=(0,), tolerance=1e-9)
    assert _one_of_each(given, 0, 0) is None
    own[1, 0, 2] = 1
    assert _one_of_each(given, 0, 0) == {(0, 0): 0, (1, 0): 1}


def test_rows_that_are_no_such_sum_leave_it_likely_and_many_leave_nothing():
    def noisy(*rows):
        def held(sums, rank):
            total = by_slots(sums, rank)
            for row in rows if rank == 0 else ():
                total[row] += 0.3
            return total

        return held

    (cause,) = told(noisy(4))
    assert cause.standing == "likely"
    assert told(noisy(0, 1, 2, 3, 4)) == []
