"""A row taken at another place of what a right module gives."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sumgrad.diagnose.explainers.by_modules.forwards import wrong_outputs
from sumgrad.diagnose.modules.inputs.picked import Picked, picked_otherwise
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.diagnose.modules.where.look import look_at
from sumgrad.record.trace import Traces
from traces_in_memory import trace

ROWS, PLACES, WIDTH = 4, 5, 3
BATCH = {"x": torch.arange(ROWS * PLACES).reshape(ROWS, PLACES)}
HIDDEN = torch.randn(ROWS, PLACES, WIDTH, generator=torch.Generator().manual_seed(3)).double()
LAST = torch.tensor([4, 2, 3, 1])


def traced(hidden, read, **more):
    """A module `body` that gives hidden states, and `head`, which gives one of each row."""
    held = [("body", hidden), ("head", read)]
    return trace([(name, value, torch.ones_like(value)) for name, value in held], **more)


def read(hidden, places):
    return hidden[torch.arange(len(hidden)), places]


def told(rows, places, hidden=None):
    single = traced(HIDDEN, read(HIDDEN, LAST), batch=BATCH)
    mine = HIDDEN[rows] if hidden is None else hidden
    ranks = {0: traced(mine, read(mine, places))}
    traces = Traces(tier="structure", step=0, ranks=ranks, single=single)
    look = look_at(traces, "float64", ())
    seen = [s for s in look.seen["head"] if s.forward == "wrong"]
    return list(picked_otherwise(traces, look, seen, ("body",)))


def test_the_place_of_each_row_that_is_another():
    found = told([1, 2], torch.tensor([4, 3]))
    assert found == [
        Picked(rank=0, call=0, row=0, module="body", places=(4, 2), of=(PLACES, PLACES))
    ]


def test_rows_that_are_cut_have_places_of_their_own():
    (one,) = told([1, 3], torch.tensor([0, 1]), HIDDEN[[1, 3], :3])
    assert (one.places, one.of, one.row) == ((0, 2), (3, PLACES), 0)


def test_nothing_is_said_where_all_is_right_or_the_vector_is_none_of_them():
    assert told([1, 2], LAST[[1, 2]]) == []
    single = traced(HIDDEN, read(HIDDEN, LAST), batch=BATCH)
    ranks = {0: traced(HIDDEN[:2], read(HIDDEN[:2], LAST[:2]) + 1)}
    traces = Traces(tier="structure", step=0, ranks=ranks, single=single)
    look = look_at(traces, "float64", ())
    assert [s.forward for s in look.seen["head"]] == ["wrong"]
    assert list(picked_otherwise(traces, look, look.seen["head"], ("body",))) == []


def test_rows_that_are_told_by_nothing_have_no_place():
    """Two rows of one text: which of them it is, and what it should read, is not known."""
    same = HIDDEN.clone()
    same[2] = same[1]
    single = traced(same, read(same, LAST), batch=BATCH)
    ranks = {0: traced(same[[1, 0]], read(same[[1, 0]], torch.tensor([4, 1])))}
    traces = Traces(tier="structure", step=0, ranks=ranks, single=single)
    look = look_at(traces, "float64", ())
    found = picked_otherwise(traces, look, look.seen["head"], ("body",))
    assert [one.row for one in found] == [1]


def test_each_call_is_held_against_the_same_call_of_the_module():
    single = traced(HIDDEN, read(HIDDEN, LAST), batch=BATCH)
    calls = []
    for rows, places in (([0, 1], LAST[[0, 1]]), ([2, 3], torch.tensor([3, 0]))):
        own = HIDDEN[rows]
        calls += [("body", own), ("head", read(own, places))]
    mine = trace([(name, value, torch.ones_like(value)) for name, value in calls])
    traces = Traces(tier="structure", step=0, ranks={0: mine}, single=single)
    look = look_at(traces, "float64", ())
    (one,) = picked_otherwise(
        traces, look, [s for s in look.seen["head"] if s.forward == "wrong"], ("body",)
    )
    assert (one.call, one.row, one.places) == (1, 1, (0, 1))


def test_equal_vectors_tell_no_place():
    same = HIDDEN[[1, 2]].clone()
    same[0, 4] = same[0, 3]
    assert told([1, 2], torch.tensor([4, 3]), same) == []


def test_in_words_where_it_is_taken(monkeypatch):
    single = traced(HIDDEN, read(HIDDEN, LAST), batch=BATCH)
    mine = HIDDEN[[1, 2, 0]]
    ranks = {0: traced(mine, read(mine, torch.tensor([4, 3, 1])))}
    traces = Traces(tier="t", step=0, ranks=ranks, single=single)
    look = look_at(traces, "float64", ())
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: traces)
    monkeypatch.setattr(wrong_outputs, "entered_wrong", lambda *_: ())
    found = FirstWrong(wrong="head", seen=tuple(look.seen["head"]), beside=("body",))
    for dtype, said in (
        ("float64", ["on rank 0 in call 0 what it gives for row 0 is what body gives at place 4 of "
                     "5, and in the single process what that gives at place 2 of 5, and so in 1 "
                     "more: look at how the place is found"]),
        ("float32", []),
    ):  # fmt: skip
        record = SimpleNamespace(spec=SimpleNamespace(tiers={"t": dtype}))
        case = SimpleNamespace(tier="t", record=record)
        assert wrong_outputs.picked_in_words(case, look, found) == said


def test_of_modules_that_hand_the_same_on_each_row_is_counted_once(monkeypatch):
    of = [("body", 0), ("body", 2), ("inner", 0), ("inner", 2)]
    told = [Picked(rank=0, call=0, row=r, module=m, places=(1, 2), of=(5, 5)) for m, r in of]
    monkeypatch.setattr(wrong_outputs, "traces_looked_at", lambda _: SimpleNamespace())
    monkeypatch.setattr(wrong_outputs, "entered_wrong", lambda *_: ())
    monkeypatch.setattr(wrong_outputs, "picked_otherwise", lambda *_: iter(told))
    record = SimpleNamespace(spec=SimpleNamespace(tiers={"t": "float64"}))
    seen = SimpleNamespace(call=SimpleNamespace(module="head"))
    found, look = SimpleNamespace(seen=[seen], modules=()), SimpleNamespace(modules=())
    (said,) = wrong_outputs.picked_in_words(SimpleNamespace(tier="t", record=record), look, found)
    assert "and so in 1 more:" in said
