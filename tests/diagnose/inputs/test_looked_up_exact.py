"""Rows of a table that the single process looks up and no rank does, by their numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.base.verdict import Diagnosis
from sumgrad.diagnose.explainers.by_modules import forward
from sumgrad.diagnose.explainers.by_modules.rows.looked_up import with_rows_looked_up
from sumgrad.diagnose.modules.inputs import looked_up
from sumgrad.diagnose.modules.inputs.looked_up import looked_up_beside, rows_looked_up_there_alone
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong
from sumgrad.record.computed import Computation, Computed

TABLE = torch.randn(9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def trace(*ids, values=TABLE, left_out=()):
    """Of one process, the rows that it looks up, call by call."""
    outputs = [values[torch.tensor(own)] for own in ids]
    return SimpleNamespace(
        calls=[SimpleNamespace(module="table") for _ in outputs], outputs=outputs,
        left_out=left_out, sources={"table": "Embedding at torch"}, params={"table.weight": TABLE},
    )  # fmt: skip


def found(single, *ranks):
    traces = SimpleNamespace(single=single, ranks=dict(enumerate(ranks)))
    return rows_looked_up_there_alone(traces, "table")


def test_rows_are_told_by_their_numbers():
    single = trace([[0, 5], [8, 3]], [[1, 5]])
    assert found(single, trace([0, 4], [8]), trace([3, 7])) == [1, 5]
    assert found(single, trace([0, 5, 8, 3, 1])) == []
    assert found(single, trace()) == [0, 1, 3, 5, 8]


@pytest.mark.parametrize(
    "single",
    [
        trace([0, 1], values=TABLE * 2),  # no rows of it
        SimpleNamespace(**{**vars(trace([0, 1])), "sources": {"table": "Linear"}}),
        SimpleNamespace(**{**vars(trace([0, 1])), "params": {}}),
        SimpleNamespace(**{**vars(trace([0, 1])), "params": {"table.weight": TABLE[[0, 0, 1]]}}),
        trace([0, 1], left_out=("table",)),
    ],
)
def test_what_cannot_be_told_is_not(single):
    assert found(single, trace([0])) is None


@pytest.mark.parametrize("most", [TABLE.numel() - 1, TABLE.numel()])
def test_large_tables_and_outputs_are_not_looked_through(monkeypatch, most):
    monkeypatch.setattr(looked_up, "MOST_NUMBERS", most)
    large = most == TABLE.numel()
    assert (found(trace([0, 1]), trace([0])) == [1]) == large
    assert found(trace([0, 1] * 5), trace([0])) is None  # 10 rows


def test_the_words_have_the_rows():
    traces = SimpleNamespace(single=trace([0, 1, 2]), ranks={0: trace([1])})
    look = SimpleNamespace(
        paths=SimpleNamespace(all_below=lambda _: {"table"}), modules=["table", "over"],
        lacking={"table"}, sources={"table": "Embedding"},
    )  # fmt: skip
    wrong = FirstWrong(wrong="over", seen=())
    (said,) = forward._lacking_below(SimpleNamespace(traces=traces), look, wrong)
    assert said.endswith("was found on no rank (rows 0, 2 of table.weight): look at what is handed "
                         "to it, which rows or parts of them")  # fmt: skip
    traces.ranks[0] = trace([0, 1, 2])
    (said,) = forward._lacking_below(SimpleNamespace(traces=traces), look, wrong)
    assert "was found on no rank: look" in said


def looking(*ids, table=TABLE, function="embedding"):
    """A rank that looks these rows up itself, call by call; no module does."""
    values = [table, *map(torch.tensor, ids)]
    calls = tuple(
        Computation(function=function, line="/x/a.py:7", code="y = F.embedding(at, w)",
                    takes=(i, 0), made_at=())
        for i in range(1, len(values))
    )  # fmt: skip
    computed = Computed(computations=calls, values=tuple(values))
    return SimpleNamespace(calls=[], outputs=[], left_out=(), computed=computed)


def beside(single, *ranks):
    found = looked_up_beside(SimpleNamespace(single=single, ranks=dict(enumerate(ranks))))
    return [(one.module, one.ranks, one.here, one.there, one.by) for one in found]


def test_rows_that_all_lie_so_many_before_those_of_the_module():
    single = trace([[2, 3], [4, 5]])
    whole = [("table", (0, 1), (0, 1, 2, 3), (2, 3, 4, 5), 2)]
    assert beside(single, looking([0, 1]), looking([3, 2], [1, 0])) == whole
    assert beside(single, looking([0, 1, 2, 3]), looking()) == [("table", (0,), *whole[0][2:])]
    assert beside(trace([0, 1, 2]), looking([3, 2, 1]))[0][-1] == -1


def test_rows_that_are_not_all_as_many_apart():
    """As where padding has a row of its own there."""
    assert beside(trace([1, 2, 3, 4]), looking([0, 1, 2])) == [
        ("table", (0,), (0, 1, 2), (1, 2, 3, 4), 0)
    ]
    assert beside(trace([2, 3, 4]), looking([0, 1, 3]))[0][-1] == 0


@pytest.mark.parametrize(("single", "ranks"), [
    (trace([2, 3, 4]), [looking([2, 3, 4])]),  # the same
    (trace([2, 3, 4, 5]), [looking([2, 3, 4])]),  # a part
    (trace([2, 3]), [looking([0, 1])]),  # few
    (trace([2, 3, 4]), [looking([0, 1, 2], table=TABLE + 1)]),  # of another table
    (trace([2, 3, 4]), [looking([0, 1, 2], function="index_add")]),
    (trace([2, 3, 4]), [looking([0, 1, 2]), trace([2, 3, 4])]),  # the module is called, too
    (trace([2, 3, 4], values=TABLE * 2), [looking([0, 1, 2])]),  # no rows of it
    (trace([2, 3, 4], left_out=("table",)), [looking([0, 1, 2])]),
    (trace(), [looking([0, 1, 2])]),
])  # fmt: skip
def test_what_is_not_known_to_lie_beside_is_not_told(single, ranks):
    for rank in ranks:
        rank.computed = getattr(rank, "computed", Computed())
    assert beside(single, *ranks) == []


def test_rows_that_are_the_same_have_no_number():
    twice = TABLE[[0, 1, 2, 3, 4, 5, 5]]
    single = trace([2, 3, 4], values=twice)
    single.params = {"table.weight": twice}
    assert beside(single, looking([0, 1, 2], table=twice)) == []


def test_the_words_say_by_how_many_and_only_beside_a_place():
    traces = SimpleNamespace(single=trace([2, 3, 4]), ranks={1: looking([0, 1, 2])})
    case = SimpleNamespace(traces=traces)
    (said, rest) = with_rows_looked_up(
        case, Diagnosis(cause="c", kind="forward", because=("b",))
    ).because
    assert rest == "b"
    assert said.startswith("a.py:7 `y = F.embedding(at, w)` looks up rows 0-2 of table.weight "
                           "on rank 1, and table (Embedding at torch")  # fmt: skip
    assert "in the single process rows 2-4, 2 behind these: it is called on no rank" in said
    traces.ranks[1] = looking([3, 4, 5])
    (said, _) = with_rows_looked_up(case, Diagnosis(cause="c", kind="open", because=("b",))).because
    assert "rows 2-4, 1 before these: it" in said
    traces.ranks[1] = looking([3, 4, 6])
    (said, _) = with_rows_looked_up(case, Diagnosis(cause="c", kind="open", because=("b",))).because
    assert "rows 2-4: it is called on no rank" in said
    for known in (Diagnosis(cause="c", kind="avg"),
                  Diagnosis(cause="c", kind="forward", standing="proved")):  # fmt: skip
        assert with_rows_looked_up(case, known) == known
    nothing = Diagnosis(cause="c", kind="forward")
    assert with_rows_looked_up(SimpleNamespace(traces=None), nothing) == nothing
