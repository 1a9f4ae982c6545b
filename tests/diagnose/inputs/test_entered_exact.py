"""Whole numbers that enter a module, and the features of vectors that are wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.modules.inputs.entered import Odd, are_taken_alike, odd_rows
from sumgrad.diagnose.modules.values.features import wrong_features
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Call, Trace, Traces

ROWS = torch.tensor([[4, 8, 5, 9, 6], [7, 7, 2, 3, 1]])


def trace(output: torch.Tensor, data: torch.Tensor) -> Trace:
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    return Trace(calls=(call,), outputs=(output,), gradients=(torch.ones_like(output),),
                 sources={"m": "Embedding"}, data=(data,), entered=("m",),
                 batch={"ids": ROWS})  # fmt: skip


@pytest.mark.parametrize(
    ("row", "odd"),
    [
        ([8, 5, 9], None),  # a stretch
        ([7, 7, 2, 3, 1, 0, 0], None),  # more than the whole row, as where it is padded
        ([0, 4, 8, 5, 9], Odd(call=0, row=0, of=0, by=1)),
        ([2, 3, 1, 0, 0], Odd(call=0, row=0, of=1, by=-2)),
        ([7, 2, 3, 1, 5], Odd(call=0, row=0, of=1, by=-1)),
        ([4, 8, 0, 9, 6], Odd(call=0, row=0, of=0, others=1, size=5, at=2, now=0, was=5)),
        ([1, 0, 0, 0, 9], Odd(call=0, row=0)),
    ],
)
def test_rows_that_are_none_of_those_that_enter_there(row, odd):
    out = torch.zeros(1, 3)
    found = list(odd_rows(trace(out, torch.tensor([row])), trace(out, ROWS), "m"))
    assert found == ([] if odd is None else [odd])


def test_a_row_is_looked_for_among_those_of_its_argument_and_told_by_its_call():
    out = torch.zeros(1, 3)

    def handed(*data):
        named = tuple((i // 2, ("ids", "types")[i % 2]) for i in range(len(data)))
        return replace(trace(out, data[0]), data=data, entered=("m",) * len(data),
                       entered_as=named)  # fmt: skip

    types = torch.tensor([[0, 0, 0, 1, 2], [3, 1, 2, 1, 0]])
    mine = handed(ROWS[:1], types[:1], ROWS[1:], torch.tensor([[0, 3, 1, 2, 1]]))
    (one,) = odd_rows(mine, handed(ROWS, types), "m")
    assert one == Odd(call=1, row=0, name="types", of=1, by=1)
    names = [one.name for one in odd_rows(handed(types, ROWS), handed(ROWS, types), "m")]
    assert names == ["ids", "ids", "types", "types"]


def test_zeros_and_ones_are_like_many_rows():
    rows = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]])
    mine = torch.tensor([[1, 0, 1, 1, 1]])
    out = torch.zeros(1, 3)
    assert list(odd_rows(trace(out, mine), trace(out, rows), "m")) == [Odd(call=0, row=0)]


@pytest.mark.parametrize("wrong", [(2, 3), (0,), (1, 2, 3, 4, 5)])
def test_features_that_are_wrong_in_some_vector(wrong):
    drawn = torch.Generator().manual_seed(3)
    whole = torch.randn(6, 8, generator=drawn, dtype=torch.float64)
    mine = whole[2:5].clone()
    mine[:, list(wrong)] += 1
    traces = Traces(tier="structure", step=0, single=trace(whole, ROWS),
                    ranks={0: trace(mine, ROWS)})  # fmt: skip
    (seen,) = look_at(traces, "float64", ()).seen["m"]
    assert seen.forward == "wrong"
    assert wrong_features(traces, [seen], "float64") == (list(wrong), 8)


def test_vectors_that_are_right_in_few_features_tell_none():
    whole = torch.arange(48, dtype=torch.float64).reshape(6, 8).sin()
    mine = whole[2:5].clone()
    mine[:, 1:] += 1
    traces = Traces(tier="structure", step=0, single=trace(whole, ROWS),
                    ranks={0: trace(mine, ROWS)})  # fmt: skip
    (seen,) = look_at(traces, "float64", ()).seen["m"]
    assert wrong_features(traces, [seen], "float64") is None


@pytest.mark.parametrize(
    ("odd", "nearly"),
    [
        (Odd(call=0, row=0, of=1, others=1, size=4), True),
        (Odd(call=0, row=0, of=1, others=2, size=4), False),
        (Odd(call=0, row=0, of=1, by=2, size=4), False),  # moved, as rows that are padded are
        (Odd(call=0, row=0, size=4), False),
    ],
)
def test_a_row_but_for_few_of_its_elements(odd, nearly):
    assert odd.is_nearly_one == nearly


LONG = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(4))
ZIGZAG = [0, 1, 6, 7]


@pytest.mark.parametrize(("rows", "alike"), [
    (LONG[:, ZIGZAG], True),
    (LONG[[2, 0]][:, ZIGZAG], True),
    (LONG[:1, ZIGZAG], False),  # of one row any order would be
    (torch.stack([LONG[0, ZIGZAG], LONG[1, [1, 0, 6, 7]]]), False),
    (LONG[:, ZIGZAG] + 50, False),
    (LONG[:, :2], False),  # too few to tell
])  # fmt: skip
def test_places_that_all_rows_are_taken_at(rows, alike):
    assert are_taken_alike(list(rows), list(LONG)) == alike
    out = torch.zeros(1, 3)
    if len(rows[0]) > 2:
        odd = list(odd_rows(trace(out, rows), trace(out, LONG), "m"))
        assert bool(odd) != alike


def test_rows_that_are_all_one_to_the_right_are_told_all_the_same():
    out, rolled = torch.zeros(1, 3), LONG.roll(1, 1)
    assert are_taken_alike(list(rolled), list(LONG))
    assert [one.by for one in odd_rows(trace(out, rolled), trace(out, LONG), "m")] == [1, 1, 1]


def of_a_graph(features, edges):
    """A call that is handed rows of features, and in two lines which of them are joined."""
    data = (torch.zeros(features, 3), torch.tensor(edges))
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    out = torch.zeros(1, 3)
    return Trace(calls=(call,), outputs=(out,), gradients=(out,), sources={}, data=data,
                 entered=("m", "m"), entered_as=((0, "x"), (0, "edges")))  # fmt: skip


WHOLE_GRAPH = [[0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 0]]


@pytest.mark.parametrize(
    ("features", "num"),
    [
        (4, 0),  # as many rows as the edges number: a part of the graph, numbered anew
        (5, 2),  # others than these
        (7, 2),  # the whole graph's
    ],
)
def test_numbers_of_the_rows_of_a_part_are_held_against_nothing(features, num):
    mine = of_a_graph(features, [[3, 0, 2, 1, 0], [0, 2, 3, 3, 1]])
    if features == 7:
        mine = of_a_graph(features, [[3, 0, 6, 1, 0], [0, 2, 3, 3, 1]])
    assert len(list(odd_rows(mine, of_a_graph(7, WHOLE_GRAPH), "m"))) == num


def test_a_row_of_another_length_is_none_of_them_but_for_a_few():
    """Its first numbers are those of a row that is three times as long."""
    out = torch.zeros(1, 3)
    long = torch.arange(1, 19)[None]
    short = torch.tensor([[1, 2, 3, 4, 9, 6]])
    assert list(odd_rows(trace(out, short), trace(out, long), "m")) == [Odd(call=0, row=0)]
    (one,) = odd_rows(trace(out, short), trace(out, long[:, :7]), "m")
    assert (one.of, one.others, one.at, one.now, one.was) == (0, 1, 4, 9, 5)


@pytest.mark.parametrize(("second", "of_all", "said"), [
    ((2, 3), ([2, 3], 8), "its output elements 2-3 of 8"),
    ((5,), None, "its output, on rank 0 in call 0 elements 2-3 of 8"),
])  # fmt: skip
def test_features_that_are_wrong_on_one_rank_are_told_of_it(monkeypatch, second, of_all, said):
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ranks = {}
    for rank, wrong in enumerate(((2, 3), second)):
        mine = whole[2:5].clone()
        mine[:, list(wrong)] += 1
        ranks[rank] = trace(mine, ROWS)
    traces = Traces(tier="structure", step=0, single=trace(whole, ROWS), ranks=ranks)
    seen = look_at(traces, "float64", ()).seen["m"]
    assert wrong_features(traces, seen, "float64") == of_all
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda case: traces)
    monkeypatch.setattr(wrong_outputs, "entered_wrong", lambda *_: ())
    spec = SimpleNamespace(tiers={"structure": "float64"})
    case = SimpleNamespace(tier="structure", record=SimpleNamespace(spec=spec))
    found = FirstWrong(wrong="m", seen=tuple(seen))
    (text,) = wrong_outputs.features_in_words(case, found)
    beside = "are not what stands beside the others in the single process"
    assert text == f"of each such vector of {said} {beside}"
