"""Whole numbers that enter a module: of another field, moved by chance, or usual where right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.rows import odd_data
from sumgrad.diagnose.modules.inputs import companions
from sumgrad.diagnose.modules.inputs.entered import Odd, row_of
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.record.trace import Call, Trace

WORDS = torch.tensor([[4, 8, 5, 9, 6], [7, 7, 2, 3, 1], [0, 3, 6, 1, 2]])
LABELS = torch.tensor([[1, 9, 9, 0, 4], [6, 2, 8, 8, 1], [3, 0, 5, 7, 7]])
BATCH = {"words": WORDS, "labels": LABELS, "x": torch.zeros(3, 2)}
MADE = ("/x/step.py:9", "flat.view(shape)")


def trace(*data, made=MADE, batch=None):
    calls = tuple(
        Call(module="m", number=i, part=0, operation=0, operation_back=0, recomputed=False)
        for i in range(len(data))
    )
    out = torch.zeros(1, 3)
    return Trace(
        calls=calls, outputs=(out,) * len(data), gradients=(None,) * len(data), sources={},
        data=data, entered=("m",) * len(data), batch=batch, entered_at=(made,) * len(data),
        entered_as=tuple((i, "") for i in range(len(data))),
    )  # fmt: skip


def said(*ranks, right=()):
    """right: (rank, call) where m comes out right."""
    single = trace(WORDS, batch=BATCH)
    case = SimpleNamespace(traces=SimpleNamespace(ranks=dict(enumerate(ranks)), single=single))
    seen = [
        Seen(rank=rank, call=call, shape=(1, 3), in_order=True,
             forward="right" if (rank, call.number) in right else "wrong")
        for rank, held in enumerate(ranks)
        for call in held.calls
    ]  # fmt: skip
    look = SimpleNamespace(modules=("m",), seen={"m": seen})
    found = SimpleNamespace(wrong="m", modules=(), ranks=tuple(range(len(ranks))))
    odd = odd_data.odd_data(case, look, found)
    return (None, []) if odd is None else (odd.module, [*odd.said])


def test_rows_of_another_field_of_the_batch():
    assert said(trace(LABELS[1:])) == (
        "m",
        [
            "what enters m on rank 0, made at step.py:9 `flat.view(shape)` is `labels` of the "
            "batch: row 0 of call 0 is row 1 of it; row 1 of call 0 is row 2 of it"
        ],
    )
    _, (text,) = said(trace(LABELS[1:, 1:], made=("", "")))
    assert text.startswith("what enters m on rank 0 is `labels` of the batch")


def test_one_row_is_not_told_by_a_field():
    assert said(trace(LABELS[:1])) == (
        "m",
        [
            "whole numbers that enter m are no row, nor a stretch of a row, of those in the "
            "single process: on rank 0 row 0 is like none",
            "they were made at step.py:9 `flat.view(shape)`",
        ],
    )


@pytest.mark.parametrize(
    ("moved", "told"), [((2, 2, 2), 3), ((2, 2, 0), 2), ((2, 0, 0), 0), ((2, -1, 0), 0), ((2,), 0)]
)
def test_what_is_moved_by_chance_is_not_said_to_be(moved, told):
    odd = [Odd(call=0, row=i, of=0 if by else None, by=by) for i, by in enumerate(moved)]
    assert sum(one.by != 0 for one in odd_data._without_chance(odd)) == told
    nearly = Odd(call=0, row=3, of=1, others=1, size=5)
    assert odd_data._without_chance([nearly]) == [nearly]


def test_rows_like_none_tell_nothing_where_they_come_out_right_too():
    """As what each micro-batch numbers anew."""
    other = torch.tensor([[9, 1, 0, 9, 2]])
    assert said(trace(other, other.flip(1)), right={(0, 1)}) == (None, [])
    assert said(trace(other, other.flip(1)))[0] == "m"
    nearly = WORDS[:1].clone()
    nearly[0, 2] = 0  # is told by its own row all the same
    _, (text, _) = said(trace(nearly, other), right={(0, 1)})
    assert "row 0 is that one's row 0 but for 1 of its elements" in text
    assert "like none" not in text


def test_a_row_that_is_moved_by_chance_is_like_none():
    moved = torch.tensor([[9, 0, 4, 8, 5], [9, 9, 1, 0, 9]])
    _, (text, _) = said(trace(moved))
    assert "row 0 is like none" in text
    assert "moved" not in text


def test_which_row_of_a_field_it_is():
    odd = Odd(call=0, row=0)
    assert row_of(trace(LABELS[1:2]), "m", odd, LABELS) == 1
    assert row_of(trace(LABELS[1:2]), "m", odd, torch.cat([LABELS, LABELS])) is None  # two are
    assert row_of(trace(torch.tensor([[1, 1, 1]])), "m", odd, torch.ones(1, 5).long()) is None
    assert row_of(trace(LABELS[1:2]), "m", odd, LABELS.double()) is None
    assert row_of(trace(LABELS[1:2]), "m", Odd(call=3, row=0), LABELS) is None


def test_the_line_is_that_of_the_whole_numbers_not_of_what_enters_beside():
    mine = trace(torch.zeros(2, 3), LABELS[1:])
    mine = replace(mine, entered_as=((0, ""), (0, "")), entered_at=(("/x/a.py:2", "x"), MADE))
    assert odd_data._made(mine, "m", Odd(call=0, row=0)) == MADE


def test_the_line_that_made_what_a_row_does_not_have_beside():
    mine = trace(LABELS[1:], LABELS[1:])
    mine = replace(mine, entered_as=((0, "words"), (0, "levels")), entered_at=(("", ""), MADE))
    odd = companions.Odd(call=0, row=0, told="words", of=0, name="levels")
    traces = SimpleNamespace(ranks={1: mine})
    at = odd_data.line_and_code(*MADE)
    assert odd_data._handed_from(traces, 1, "m", odd) == f", which was made at {at}"
    assert odd_data._handed_from(traces, 1, "m", replace(odd, name="words")) == ""
    assert odd_data._handed_from(traces, 1, "m", replace(odd, call=1)) == ""
    assert odd_data._handed_from(traces, 1, "n", odd) == ""
