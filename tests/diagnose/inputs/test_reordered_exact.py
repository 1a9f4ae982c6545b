"""Modules that give their rows in another order than they get them, found by values alone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows.reordered import reordered_in_words
from sumgrad.diagnose.modules.inputs import reordered as modules
from sumgrad.diagnose.modules.inputs.reordered import Reordered, reordered
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.trace import INTO, Call, Trace, Traces

IDS = torch.arange(24).reshape(8, 3)
OUT = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def call(module, number):
    return Call(module=module, number=number, part=0, operation=0, operation_back=0,
                recomputed=False)  # fmt: skip


def trace(*rows, ids=True):
    """Calls of `m`: which rows go in, and which come out."""
    calls, outputs, data, entered, entered_as = [], [], [], [], []
    for number, (gets, gives) in enumerate(rows):
        if ids:
            data.append(IDS[list(gets)])
            entered.append("m")
            entered_as.append((number, "ids"))
        else:
            calls.append(call(f"{INTO}m", number))
            outputs.append(2.0 * OUT[list(gets)])
        calls.append(call("m", number))
        outputs.append(OUT[list(gives)])
    return Trace(calls=tuple(calls), outputs=tuple(outputs), gradients=(None,) * len(calls),
                 sources={}, data=tuple(data), entered=tuple(entered),
                 entered_as=tuple(entered_as))  # fmt: skip


def both(*ranks, ids=True):
    every = range(8)
    single = trace((every, every), ids=ids)
    mine = {rank: trace(*rows, ids=ids) for rank, rows in enumerate(ranks)}
    return Traces(tier="structure", step=0, single=single, ranks=mine)


@pytest.mark.parametrize("ids", [True, False])
def test_rows_that_are_given_in_another_order(ids):
    traces = both([((0, 1, 2), (2, 1, 0)), ((3,), (3,))], [((4, 5), (4, 5))], ids=ids)
    assert reordered(traces, "m") == [Reordered(rank=0, call=0, gets=(0, 1, 2), gives=(2, 1, 0))]


@pytest.mark.parametrize("rows", [
    [((0, 1, 2), (0, 1, 2)), ((4, 5), (4, 5))],  # as they are
    [((0, 1), (2, 3)), ((4, 5), (5, 4))],  # other rows than it gets, as all sorted by length
    [((0, 1), (1, 0))],  # one call alone
    [(tuple(range(8)), (1, 0, *range(2, 8))), ((4, 5), (5, 4))],  # all rows, as there in one call
])  # fmt: skip
def test_rows_that_are_where_they_belong(rows):
    assert reordered(both(rows), "m") == []


def test_more_numbers_than_can_be_compared_are_not(monkeypatch):
    traces = both([((0, 1, 2), (2, 1, 0)), ((3,), (3,))], [((4, 5), (4, 5))])
    monkeypatch.setattr(modules, "MOST", 10)
    assert reordered(traces, "m") == []


def test_rows_that_are_not_told_are_none():
    """Equal ones, and those that the single process has not."""
    traces = both([((0, 1, 2), (2, 1, 0)), ((4, 5), (4, 5))])
    mine = traces.ranks[0]
    other = SimpleNamespace(single=traces.single, ranks={0: _with(mine, OUT[[2, 1, 1]] + 1.0)})
    assert reordered(other, "m") == []
    twins = SimpleNamespace(single=_with(traces.single, OUT[[0, 1, 1, 3, 4, 5, 6, 7]]),
                            ranks={0: _with(mine, OUT[[1, 1, 0]])})  # fmt: skip
    assert reordered(twins, "m") == []


def _with(one, first):
    return replace(one, outputs=(first, *one.outputs[1:]))


@pytest.mark.parametrize(("way", "state", "told"), [
    (("m",), "right", True), ((), "right", False), (("m",), "wrong", False),
])  # fmt: skip
def test_it_is_told_of_what_is_on_the_way_and_right_by_its_values(way, state, told):
    traces = both([((0, 1), (1, 0)), ((3,), (3,))], [((4, 5), (5, 4))])
    look = SimpleNamespace(modules=("m", "head"), sources={}, forward=lambda m: state,
                           paths=SimpleNamespace(all_below=lambda m: {*way}))  # fmt: skip
    found = FirstWrong(wrong="head", seen=())
    said = reordered_in_words(SimpleNamespace(traces=traces), look, found)
    assert said == ([
        "m gives its rows in another order than it gets them on rank 0-1: on rank 0 in call 0 it "
        "gets the single process's rows 0, 1 and gives what that makes of rows 1, 0, and so in 1 "
        "more call of all ranks"
    ] if told else [])  # fmt: skip
    assert reordered_in_words(SimpleNamespace(traces=None), look, found) == []
