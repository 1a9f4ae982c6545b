"""The rows that a small shard holds: one stretch or two, told from fewer numbers than rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.row_fit import explain_rank
from sumgrad.record.reference import ALL

ROWS = 13


def case_of(held, *, numel=5, seed=3, like=None, zero=()):
    """A rank that holds these rows of `numel` elements. like: rows whose gradients are the same;
    zero: rows that have none."""
    drawn = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS, numel, generator=drawn, dtype=torch.float64)
    for a, b in like or ():
        rows[a] = rows[b]
    rows[list(zero)] = 0
    total = rows.sum(0)
    reference = SimpleNamespace(
        kinds={"loss": "rows"}, intervals=tuple((i, i + 1) for i in range(ROWS)),
        grads={"w": total}, by_term={"loss": {"w": total}}, partials={("loss", ALL): {"w": rows}},
    )  # fmt: skip
    wanted = SimpleNamespace(value=total, threshold=1e-12, size=1.0, scale=1.0)
    cell = SimpleNamespace(name="w", measured=rows[held].sum(0), wanted=wanted, index=None)
    return SimpleNamespace(reference=reference, previous=None), [cell]


def rows_of(found):
    return [i for i, value in enumerate(found.values) if value == 1]


@pytest.mark.parametrize(
    "held", [[0, 1, 2], [3, 4, 9, 10], [0, 12], [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12], [6]]
)
def test_rows_of_one_stretch_or_two(held):
    found = explain_rank(*case_of(held))
    assert (found.level, rows_of(found)) == ("rows", held)


@pytest.mark.parametrize(
    ("held", "more"),
    [
        ([0, 3, 6, 9], {}),  # four stretches
        ([0, 4, 5], {"numel": 2}),  # two numbers fit by chance
        ([2, 9, 10], {"like": [(5, 2)]}),  # 2 or 5: two answers
        ([2], {"like": [(5, 2)]}),
    ],
)
def test_what_does_not_tell_its_rows_is_not_said(held, more):
    assert explain_rank(*case_of(held, **more)) is None


def test_a_little_off_is_no_sum_of_rows():
    case, (cell,) = case_of([3, 4, 9, 10])
    cell.measured = cell.measured + 1e-9
    assert explain_rank(case, [cell]) is None


@pytest.mark.parametrize("held", [[0, 1, 2, 3], [3, 4, 9, 10]])
def test_of_rows_that_give_it_nothing_nobody_can_tell(held):
    found = explain_rank(*case_of(held, zero=[4, 5, 6]))
    assert rows_of(found) == [row for row in held if row not in (4, 5, 6)]
    assert [i for i, value in enumerate(found.values) if value is None] == [4, 5, 6]
    assert [i for i, value in enumerate(found.values) if value == 0] == [
        row for row in range(ROWS) if row not in {*held, 4, 5, 6}
    ]
