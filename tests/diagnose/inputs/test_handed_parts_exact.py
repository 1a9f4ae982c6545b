"""Rows put together of other rows' parts, pairs that stand twice, memory that is written over."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules.in_code import written_over
from sumgrad.diagnose.explainers.by_modules.rows import odd_data
from sumgrad.diagnose.modules.inputs.pairs_twice import pairs_twice
from sumgrad.diagnose.modules.inputs.parts_handed import joined_parts
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import Computation, Computed
from sumgrad.record.trace import Call, Trace

AT = ("step.py:9", "ids.view(shape)")
QUESTIONS = torch.arange(36).reshape(3, 3, 4)  # three choices of four tokens each
NO_LINE = ("", "")


def trace(*data, name="ids", module="m", made=AT, computations=()):
    n = len(data)
    return Trace(calls=(), outputs=(), gradients=(), sources={}, data=data, entered=(module,) * n,
                 entered_as=tuple((i, name) for i in range(n)), entered_at=(made,) * n,
                 computed=Computed(computations=computations))  # fmt: skip


def joined(*data, single=QUESTIONS, name="ids"):
    return [(one.call, one.row, one.of) for one in joined_parts(trace(*data), trace(single), "m")]


def test_rows_of_other_rows_parts():
    mixed = torch.stack([QUESTIONS[[0, 1, 0], [0, 0, 1]], QUESTIONS[1]])
    assert joined(mixed) == [(0, 0, ((0, 0), (1, 0), (0, 1)))]
    assert joined(QUESTIONS[1:]) == []
    assert joined(QUESTIONS[:1, [1, 0, 2]]) == [(0, 0, ((0, 1), (0, 0), (0, 2)))]
    assert joined(QUESTIONS[1:], mixed[:1]) == [(1, 0, ((0, 0), (1, 0), (0, 1)))]
    assert joined(QUESTIONS[:, 1:]) == []  # as a rank holds of a row that is cut
    assert joined(QUESTIONS[:1, [1, 0]]) == [(0, 0, ((0, 1), (0, 0)))]


def test_parts_that_are_padded_are_told_all_the_same():
    padded = torch.cat([QUESTIONS, torch.zeros(3, 3, 2, dtype=torch.long)], -1)
    assert joined(padded[:1]) == []
    assert joined(padded[[0, 1, 2], [0, 1, 2]][None]) == [(0, 0, ((0, 0), (1, 1), (2, 2)))]


@pytest.mark.parametrize("change", [
    lambda t: t.double(),
    lambda t: t > 3,
    lambda t: t[0],
    lambda t: t + 100,  # of no row
    torch.zeros_like,  # like many
    lambda t: t.repeat(1, 90, 1),  # too many
])  # fmt: skip
def test_of_other_data_nothing_is_said(change):
    mixed = QUESTIONS[[0, 1, 0], [0, 0, 1]][None]
    assert joined(change(mixed)) == []


def test_a_part_that_stands_in_several_rows_tells_nothing():
    twice = QUESTIONS.clone()
    twice[2, 0] = twice[1, 0]
    assert joined(QUESTIONS[[0, 1, 0], [0, 0, 1]][None], single=twice) == []
    assert not list(joined_parts(trace(QUESTIONS[:1, [1, 0, 2]]), trace(QUESTIONS, name="x"), "m"))
    assert not list(joined_parts(trace(QUESTIONS[:1, [1, 0, 2]]), trace(QUESTIONS), "n"))


EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
DOUBLE = torch.tensor([[0, 1, 2, 0, 1], [1, 2, 3, 1, 2]])


def twice(*data, single=EDGES, name="ids"):
    found = pairs_twice(trace(*data), trace(single, name=name), "m")
    return [(one.call, one.pairs) for one in found]


def test_pairs_that_stand_twice():
    assert twice(EDGES[:, :3], DOUBLE) == [(1, ((0, 1), (1, 2)))]
    assert twice(DOUBLE, single=DOUBLE) == []
    assert twice(DOUBLE, name="other") == []
    assert twice(DOUBLE.double()) == []
    assert twice(DOUBLE.T.contiguous()) == []  # rows of two
    assert twice(torch.tensor([[4, 4], [4, 4]])) == []  # two rows of two are no pairs


def said(single, rank, right=()):
    """right: numbers of calls in which it comes out right."""
    case = SimpleNamespace(traces=SimpleNamespace(ranks={0: rank}, single=single))
    call = Call(module="m", number=0, part=0, operation=0, operation_back=0, recomputed=False)
    found = FirstWrong(wrong="m", seen=(Seen(rank=0, call=call, shape=(1, 3)),))
    calls = [Seen(rank=0, call=replace(call, number=n), shape=(1, 3), forward="right")
             for n in right]  # fmt: skip
    look = SimpleNamespace(modules=("m",), seen={"m": calls})
    return odd_data.odd_data(case, look, found)


def test_in_words():
    mixed = QUESTIONS[[0, 1, 0], [0, 0, 1]][None]
    odd = said(trace(QUESTIONS), trace(mixed, mixed))
    assert (odd.module, odd.is_sure) == ("m", True)
    assert odd.said == (
        "row 0 of what m is handed as ids, made at step.py:9 `ids.view(shape)`, is put together of "
        "parts that belong elsewhere in the single process, on rank 0 in call 0: part 0 is part 0 "
        "of row 0, part 1 is part 0 of row 1, part 2 is part 1 of row 0, and so in 1 more: look at "
        "how rows and their parts are stacked, viewed and transposed",
    )
    odd = said(trace(EDGES, name="edges"), trace(DOUBLE, EDGES, DOUBLE, name="edges", made=NO_LINE))
    assert odd.is_sure
    assert odd.said == (
        "of what m is handed as edges on rank 0 in call 0, (0, 1), (1, 2) stands there more than "
        "once, and so in 1 more calls, and in the single process nothing does",
    )


def test_what_comes_out_right_all_the_same_tells_nothing():
    """As edges of padding."""
    mixed = QUESTIONS[[0, 1, 0], [0, 0, 1]][None]
    assert said(trace(QUESTIONS), trace(mixed, mixed), right=(1,)) is None
    assert said(trace(QUESTIONS), trace(mixed, QUESTIONS[:1]), right=(1,)).is_sure
    sure = said(trace(EDGES), trace(DOUBLE), right=(1,))
    assert sure.is_sure
    other = said(trace(EDGES), trace(DOUBLE), right=(0,))
    assert other is None or not other.is_sure


def took(line, *, by=NO_LINE, made=("step.py:3", "return x[a:b]"), function="getitem"):
    return Computation(function=function, line=line, code=f"code of {line}", takes=(0, "1"),
                       made_at=(made, NO_LINE), written_at=(by, NO_LINE))  # fmt: skip


HIDE = ("step.py:5", "window[hidden] = 0")
WRITES = took(HIDE[0], function="setitem", made=NO_LINE)
READS = took("step.py:7")


def told(*mine, single=(READS, WRITES), ranks=1, kind="forward"):
    traces = SimpleNamespace(
        single=trace(computations=single), ranks={r: trace(computations=mine) for r in range(ranks)}
    )
    diagnosis = Diagnosis(cause="c", kind=kind, because=("b",))
    case = SimpleNamespace(traces=traces)
    return written_over.with_what_was_written_over(case, diagnosis).because


def test_memory_that_was_written_into_before():
    over = took("step.py:7", by=HIDE)
    assert told(READS, WRITES, over, WRITES, over, ranks=2) == (
        "what step.py:7 `code of step.py:7` takes as its first argument is made at step.py:3 "
        "`return x[a:b]` of memory that step.py:5 `window[hidden] = 0` had written into before, on "
        "rank 0-1; in the single process it is never made of such memory",
        "b",
    )


@pytest.mark.parametrize(("mine", "single"), [
    ((READS, WRITES), (READS, WRITES)),
    ((took("step.py:7", by=HIDE),), (took("step.py:7", by=HIDE), WRITES)),  # there, too
    ((took("step.py:7", by=HIDE),), (READS,)),  # nothing writes there
    ((took("step.py:8", by=HIDE),), (READS, WRITES)),  # a line of the ranks alone
    ((took("step.py:7", by=HIDE, made=NO_LINE),), (READS, WRITES)),
    ((took("", by=("", "x")),), (took(""), WRITES)),
    ((took("", by=HIDE),), (took(""), WRITES)),
])  # fmt: skip
def test_what_is_written_there_too_or_elsewhere_is_not_told(mine, single):
    assert told(*mine, single=single) == ("b",)


def test_beside_what_tells_more_it_is_not_told():
    assert told(took("step.py:7", by=HIDE), kind="not_reduced") == ("b",)
