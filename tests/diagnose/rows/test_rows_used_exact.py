"""Rows that are read unevenly, in words, and what tells that it is no cause."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.by_modules.rows import rows_used


def told(monkeypatch, read, *, counted=None, proved=False, entered=""):
    """read: rank -> row -> how often; counted: the same of what a gradient reached."""
    held = {rank: Counter(own) for rank, own in read.items()}
    with_gradient = held if counted is None else {r: Counter(own) for r, own in counted.items()}
    for name, value in {
        "looked_by_rows": lambda case: "look",
        "rows_read": lambda traces, counted=False: with_gradient if counted else held,
        "rows_through": lambda look: {},
        "predicts": lambda case, weights: proved,
        "_count_alike": lambda look, rows: False,
        "add_up_evenly": lambda case: False,
        "_where_they_enter": lambda traces, by_rank: [],
        "_where_ranks_part": lambda traces: [],
        "in_the_gradients": lambda case: [],
        "named": lambda look, module: f"{module} (Linear)",
        "calls_of_rows": lambda traces: {0: {row: {0, 2} for row in read[0]}},
    }.items():
        monkeypatch.setattr(rows_used, name, value)
    spec = SimpleNamespace(facts=SimpleNamespace(num_rows=4))
    ranks = {rank: SimpleNamespace(entered=[entered, "head"]) for rank in (0, 1)}
    traces = SimpleNamespace(ranks=ranks)
    case = SimpleNamespace(traces=traces, record=SimpleNamespace(spec=spec))
    found = rows_used.uneven_rows(case)
    return None if found is None else found[0]


TWICE, ONCE = {0: {0: 2, 1: 1}, 1: {2: 1, 3: 1}}, {0: {0: 1, 1: 1}, 1: {2: 1, 3: 1}}


def test_what_is_read_again_for_a_log_is_no_cause(monkeypatch):
    assert told(monkeypatch, TWICE, counted=ONCE) is None
    cause = "the ranks do not read every row once: rows 0 2 times as often as others (rank 0)"
    assert told(monkeypatch, TWICE).cause == cause
    assert told(monkeypatch, TWICE, counted=ONCE, proved=True).cause == cause


def test_what_enters_a_module_is_not_said_of_all_that_is_read(monkeypatch):
    """A step may use a row's other fields all the same."""
    within = told(monkeypatch, TWICE, entered="backbone")
    assert within.cause.startswith("of what enters backbone (Linear), the ranks do not read every")
    assert within.because[0].startswith("of what enters backbone (Linear), rank 0 reads rows 0")
    proved = told(monkeypatch, TWICE, proved=True, entered="backbone")
    assert proved.cause.startswith("the ranks do not read every row once")


def test_in_which_calls_they_are_read_is_said(monkeypatch):
    assert "rank 0 takes rows 0 in calls 0, 2" in told(monkeypatch, TWICE).because


@pytest.mark.parametrize(
    ("times", "usual"),
    [
        ([2, 2, 2, 1], 1),  # of whole multiples the fewest, also where most have more
        ([2, 2, 3, 2], 2),
        ([3, 3, 2, 0], 3),
        ([4, 4, 2, 0], 2),
    ],
)
def test_what_is_usual(times, usual):
    assert rows_used._usual(times) == usual
