"""Factors on rows, in words: which micro-batches they are."""

from __future__ import annotations

from collections import Counter

import pytest
from sumgrad.diagnose.explainers.of_factors import rows
from sumgrad.diagnose.explainers.of_factors.rows import factor_by_rows
from sumgrad.diagnose.row_fit import Factors, Unit

NUMBERS = {0: frozenset({0, 4}), 1: frozenset({1, 5}), 2: frozenset({2, 3, 6, 7})}


class NoCase:
    """Nothing is known of it but what a test replaces."""


@pytest.fixture
def words(monkeypatch):
    for name in ("_means", "_lost_rows", "_one_odd_factor"):
        monkeypatch.setattr(rows, name, lambda *_: None)

    def said(numbers, intervals, values):
        monkeypatch.setattr(rows, "rows_of_micro_batches", lambda _: numbers)
        units = tuple(Unit(term=None, rows=pair) for pair in intervals)
        found = Factors(level="rows", units=units, values=values, sigmas=(None,) * len(values))
        return factor_by_rows(NoCase(), found, ["w"])

    return said


EACH = [(i, i + 1) for i in range(8)]


@pytest.mark.parametrize(
    ("numbers", "intervals", "values", "kind", "cause"),
    [
        (NUMBERS, EACH, (0.5, 0.25, 1, 1, 0.5, 0.25, 1, 1), "micro_batches",
         "micro-batches are counted 0: 1/2, 1: 1/4, 2: 1 in w, on every rank that has it alike"),
        (NUMBERS, EACH, (0.5, None, 1, 1, 0.5, 0.25, None, 1), "micro_batches",
         "micro-batches are counted 0: 1/2, 1: 1/4, 2: 1 in w, on every rank that has it alike"),
        (NUMBERS, EACH, (1, 0, 1, 1, 1, 0, 1, 1), "lost_rows",
         "micro-batch 1 of every rank is not in the gradient of w"),
        (NUMBERS, EACH, (1, 0, 1, 1, 1, 0, 2, 1), "row_factors", "the rows are counted different"),
        (NUMBERS, EACH, (1, 0.5, 1, 1, 1, 1, 1, 1), "row_factors", "the rows are counted differe"),
        (NUMBERS, [(0, 2), (2, 8)], (1, 0.5), "row_factors", "the rows are counted differently"),
        (NUMBERS, [(0, 2), (2, 4)], (1, 0.5), "row_factors", "the rows are counted differently"),
        (NUMBERS, EACH, (3,) * 8, "row_factors", "the rows are counted differently"),
        (None, EACH, (0.5, 0.25, 1, 1, 0.5, 0.25, 1, 1), "row_factors", "the rows are counted"),
    ],
)  # fmt: skip
def test_factors_of_micro_batches(words, numbers, intervals, values, kind, cause):
    found = words(numbers, intervals, values)
    assert (found.kind, found.cause[: len(cause)]) == (kind, cause)
    assert found.because[0].startswith("with one factor for each row interval")


TERMS = [Unit(term=t, rows=r) for t in ("main", "kl") for r in ((0, 2), (2, 3), (3, 6))]


@pytest.mark.parametrize(
    ("values", "read", "cause", "because"),
    [
        ((1, 1, 1, 0.5, 2, 3), {0: [0, 1], 1: [2], 2: [3, 4, 5]},
         "kl is counted otherwise in w: 1/2 in rows 0-1, 2 in rows 2, 3 in rows 3-5", 3),
        ((1, 1, 1, 0.5, 0.5, 3), {0: [0, 1], 1: [2], 2: [3, 4, 5]},
         "kl is counted otherwise in w: 1/2 in rows 0-2, 3 in rows 3-5", 2),
        ((1, 1, 1, 3, 6, 2), {},  # by their own number of rows
         "kl is counted otherwise in w: 3 in rows 0-1, 6 in rows 2, 2 in rows 3-5", 3),
        ((1, 1, 1, 1, 2, 2 / 3), {},
         "kl is counted otherwise in w: 1 in rows 0-1, 2 in rows 2, 2/3 in rows 3-5", 3),
        ((1, 1, 1, 0.5, 0.5, 0.5), {}, None, 0),  # one factor on the term
        ((1, 2, 1, 0.5, 2, 3), {}, None, 0),  # both are odd
    ],
)  # fmt: skip
def test_one_term_that_each_rank_weighs_by_its_own(monkeypatch, values, read, cause, because):
    monkeypatch.setattr(rows, "_rows_of_ranks", lambda _: {r: Counter(x) for r, x in read.items()})
    found = Factors(level="cells", units=tuple(TERMS), values=values, sigmas=(None,) * 6)
    said = rows._one_term(NoCase(), found, "w")
    if cause is None:
        assert said is None
        return
    assert (said.kind, said.term, said.standing) == ("term_by_rows", "kl", "proved")
    assert said.cause == cause
    assert said.because[0] == "main is counted once in all rows"
    assert len(said.because) == because - 1
    divided = {
        (3, 6, 2): "every stretch is divided by its own rows, not by all",
        (1, 2, 2 / 3): "every stretch is divided by a multiple of its own, not by all",
    }
    assert (divided.get(values[3:]) or "") in said.because[1 if len(said.because) > 1 else 0]


@pytest.mark.parametrize(
    ("values", "read", "said"),
    [
        ((0.7,) * 5 + (1.75, None, 1.75), {0: (0, 1, 2), 1: (3, 4), 2: (5,), 3: (6, 7)},
         ["so count rows 0-4 7/10 times, rows 5, 7 7/4 times: those of rank 0-1, and of rank 2-3",
          "each part is that of the ranks along shard"]),
        ((0.5,) * 4 + (2.0,) * 4, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)},
         ["so count rows 0-3 1/2 times, rows 4-7 2 times: those of rank 0, and of rank 1"]),
        ((0.5, 2.0) * 4, {0: (0, 1, 2, 3), 1: (4, 5, 6, 7)},  # parts are no ranks
         ["so count rows 0, 2, 4, 6 1/2 times, rows 1, 3, 5, 7 2 times"]),
        ((0.5,) * 4 + (2.0,) * 4, None, ["so count rows 0-3 1/2 times, rows 4-7 2 times"]),
        ((0.5,) * 8, {0: tuple(range(8))}, []),
    ],
)  # fmt: skip
def test_whose_rows_the_parts_of_a_mean_are(monkeypatch, values, read, said):
    known = None if read is None else {r: Counter(own) for r, own in read.items()}
    monkeypatch.setattr(rows, "_rows_of_ranks", lambda _: known)
    groups = [("replicate", [(0, 2), (1, 3)]), ("shard", [(0, 1), (2, 3)])]
    monkeypatch.setattr(rows, "axis_groups", lambda _: groups)
    units = tuple(Unit(term=None, rows=pair) for pair in EACH)
    found = Factors(level="rows", units=units, values=values, sigmas=(None,) * 8)
    assert rows._parts(NoCase(), found) == said
