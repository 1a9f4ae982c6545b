"""Each rank with a part of its own: what is lost where nobody else holds a parameter."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.divergent import _lost_alone
from sumgrad.diagnose.row_fit import Factors, Unit


def part(*values):
    units = tuple(Unit(term=None, rows=(i, i + 1)) for i in range(len(values)))
    return Factors(level="rows", units=units, values=values, sigmas=(None,) * len(values))


def case_of(*failing, others=()):
    cells = [SimpleNamespace(rank=rank, name=name) for rank, name in (*failing, *others)]
    return SimpleNamespace(failing_cells=cells[: len(failing)], cells=cells)


def test_rows_that_never_reach_what_one_rank_holds():
    found = _lost_alone(case_of((1, "a"), (2, "b")), {1: part(1, 1, 0), 2: part(1, 0, 0)})
    assert found.cause == "rows 2 never reach a on rank 1; rows 1-2 never reach b on rank 2"
    assert (found.kind, found.standing, found.ranks) == ("lost_rows", "proved", (1, 2))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (case_of((1, "a"), (2, "a")), {1: part(1, 0), 2: part(0, 1)}),  # to be reduced
        (case_of((1, "a"), others=[(2, "a")]), {1: part(1, 0)}),  # of which one is right
        (case_of((1, "a")), {}),
        (case_of((1, "a")), {1: part(1, 1)}),  # nothing is lost
    ],
)
def test_what_others_hold_too_is_another_matter(case, parts):
    assert _lost_alone(case, parts) is None
