"""Data of which ranks have a part each, and something is on none of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forward import _lacking_data
from sumgrad.diagnose.modules.inputs.lacking_data import lacking_data
from sumgrad.record.trace import Trace, Traces

EDGES = torch.tensor([[0, 1], [1, 2], [1, 2], [2, 0], [3, 1], [0, 3]])
LINE = ("step.py:80", "edges.split(2)[rank]")


def trace(*calls, name="edges", line=("", "")):
    """What the model is handed in each call; None where nothing."""
    given = [(number, data) for number, data in enumerate(calls) if data is not None]
    return Trace(
        calls=(), outputs=(), gradients=(), sources={}, data=tuple(d for _, d in given),
        entered=("",) * len(given), entered_as=tuple((n, name) for n, _ in given),
        entered_at=(line,) * len(given),
    )  # fmt: skip


def traces(single, *ranks):
    return Traces(tier="t", step=0, ranks=dict(enumerate(ranks)), single=single)


def told(*parts, whole=EDGES):
    found = lacking_data(traces(trace(whole), *(trace(p, line=LINE) for p in parts)))
    return [(one.argument, one.call, one.missing, one.of) for one in found]


def test_rows_that_are_on_no_rank_are_counted():
    assert told(EDGES[:2], EDGES[2:4]) == [("edges", 0, 2, 6)]
    assert told(EDGES[:2], EDGES[3:]) == [("edges", 0, 1, 6)]  # one of two alike
    assert told(EDGES[[5, 0]], EDGES[[3]]) == [("edges", 0, 3, 6)]
    numbers = torch.arange(5)
    assert told(numbers[:2], numbers[2:4], whole=numbers) == [("edges", 0, 1, 5)]


def test_the_same_part_on_every_rank_is_no_cut():
    """Of rows that the whole has twice each rank has one: all may have read the same."""
    assert told(EDGES[1:2], EDGES[1:2], whole=EDGES[:3]) == []


def test_what_is_lacking_in_one_micro_batch_may_be_in_another():
    parts = [trace(EDGES[:1], EDGES[1:2]), trace(EDGES[2:3], EDGES[3:])]
    assert list(lacking_data(traces(trace(EDGES), *parts))) == []
    assert (
        len(list(lacking_data(traces(trace(EDGES), *(trace(p) for p in (EDGES[:1], EDGES[3:]))))))
        == 1
    )


@pytest.mark.parametrize(
    "parts",
    [
        (EDGES[:3], EDGES[3:]),  # all of them
        (EDGES[:2], EDGES[:2]),  # the same on each rank: no part of a cut
        (EDGES[:2], EDGES[:1]),  # one of them twice
        (EDGES[:2], EDGES[2:4] + 1),  # others than the single process has
        (EDGES[:2], EDGES[2:4, :1]),
        (EDGES[:2],),
        (EDGES[:2], None),
    ],
)
def test_what_is_no_cut_of_the_whole_lacks_nothing(parts):
    assert told(*parts) == []


def test_the_words_have_the_argument_the_line_and_the_other_calls():
    whole = trace(EDGES, EDGES[:4], EDGES)
    ranks = [trace(EDGES[:2], EDGES[:2], EDGES[:3], line=LINE),
             trace(EDGES[2:5], EDGES[3:4], EDGES[3:], line=LINE)]  # fmt: skip
    (said,) = _lacking_data(SimpleNamespace(traces=traces(whole, *ranks)))
    assert said == (
        "of what the model is handed as edges, a part on each rank, made at step.py:80 "
        "`edges.split(2)[rank]`, 1 of 6 are on no rank in call 0, and so in 1 more call"
    )
    assert _lacking_data(SimpleNamespace(traces=None)) == []
