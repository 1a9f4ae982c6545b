"""What is said of parameters that a cause does not explain."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explanation import BROKEN, Explanation, _with_the_rest

NAMES = ("a.w", "a.b", "a.b.c", "d.w", "e.w", "f.w")
LOST = "what was made on rank 3 in micro-batch 2 is not in {}, on no rank"


def told(cause, other, kind="k"):
    """A cause of a.w, and what a second look says of the others."""
    case = SimpleNamespace(
        record=SimpleNamespace(spec=SimpleNamespace(params=NAMES)), only=None, known={}, parts=1
    )
    rest = SimpleNamespace(record=case.record, only=frozenset({"d.w"}), known={}, parts=1)
    case.of = lambda leaves: rest
    first = Diagnosis(cause=cause, kind="k")
    best = Explanation(diagnosis=first, explains=frozenset({0}), leaves=("a.b", "d.w"))
    second = Explanation(diagnosis=Diagnosis(cause=other, kind=kind), explains=frozenset({0}))
    explainers = [lambda case, left: iter([second])] if other else []
    (said,) = _with_the_rest(case, best, explainers).however
    assert case.known.get(BROKEN, []) == []
    return said


@pytest.mark.parametrize("others", ["a.b, d.w", "a.b.c, d.w, e.w and 3 more", "f.w"])
def test_the_same_of_other_parameters_is_said_once(others):
    assert told(LOST.format("a.w"), LOST.format(others)) == (
        "a.b, d.w is wrong too, and the same is seen of it"
    )


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (LOST.format("a.b").replace("rank 3", "rank 2"), "k"),
        (LOST.format("a.b"), "another"),
        (LOST.format("a.b") + ", so", "k"),
    ],
)
def test_what_differs_in_more_than_names_is_said(other, kind):
    assert told(LOST.format("a.w"), other, kind) == (
        f"a.b, d.w is wrong too, and whether by the same is not known: {other}"
    )


def test_where_nothing_is_found_that_is_said():
    assert told("c", "") == "a.b, d.w is wrong too, and whether by the same is not known"
