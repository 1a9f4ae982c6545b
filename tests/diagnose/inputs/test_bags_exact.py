"""Bags of whole numbers that end elsewhere than in the single process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows.odd_data import _bags
from sumgrad.diagnose.modules.inputs.bags import other_bags
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.trace import Trace

LINE = ("step.py:75", "values[first:last]")


def trace(*calls, names=("input", "offsets"), module="tags"):
    data = [torch.tensor(t) for call in calls for t in call]
    return Trace(
        calls=(), outputs=(), gradients=(), sources={}, data=tuple(data),
        entered=(module,) * len(data), entered_at=(LINE,) * len(data),
        entered_as=tuple((n, name) for n, _ in enumerate(calls) for name in names),
    )  # fmt: skip


WHOLE = trace(([3, 4, 7, 1, 1, 9], [0, 2, 2, 5]))  # (3, 4), (), (7, 1, 1), (9)


@pytest.mark.parametrize(("calls", "found"), [
    ([([3, 4, 7, 1, 1], [0, 2])], []),
    ([([7, 1, 1, 9], [0])], [(0, 0, 1, 4, 3)]),  # it goes on
    ([([9], [0]), ([3, 4, 7, 1], [0, 2])], [(1, 1, 2, 2, 3)]),  # it ends before
    ([([1, 7], [0])], []),  # like none
    ([([3, 4], [0, 2])], []),  # an empty one
])  # fmt: skip
def test_bags_that_end_elsewhere(calls, found):
    told = other_bags(trace(*calls), WHOLE, "tags")
    assert [(o.call, o.bag, o.of, o.size, o.theirs) for o in told] == found


def test_what_has_no_offsets_or_is_another_modules_has_no_bags():
    longer = ([7, 1, 1, 9], [0])
    assert not list(other_bags(trace(longer, names=("input", "weights")), WHOLE, "tags"))
    assert not list(other_bags(trace(longer, module="users"), WHOLE, "tags"))
    assert not list(other_bags(trace(longer), trace(longer, module="users"), "tags"))


def test_in_words():
    mine = trace(([3, 4, 7, 1, 1, 9], [0, 2]), ([7, 1], [0]))
    traces = SimpleNamespace(single=WHOLE, ranks={0: mine})
    look = SimpleNamespace(seen={"tags": []})
    found = FirstWrong(wrong="tags", seen=(SimpleNamespace(rank=0),))
    assert _bags(SimpleNamespace(traces=traces), look, found, "tags") == [
        "bag 1 of 2 that tags is handed, made at step.py:75 `values[first:last]`, on rank 0 in "
        "call 0 has 4 numbers, of which the first 3 alone are a bag of the single process's, and "
        "so in 1 more: look at where bags begin and end"
    ]
    short = SimpleNamespace(single=WHOLE, ranks={0: trace(([7, 1], [0]))})
    (said,) = _bags(SimpleNamespace(traces=short), look, found, "tags")
    assert "has 2 numbers, with which a bag of 3 begins in the single process: look" in said
