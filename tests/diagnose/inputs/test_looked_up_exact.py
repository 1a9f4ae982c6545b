"""Rows of a table that the single process looks up and no rank does, by their numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules import forward
from sumgrad.diagnose.modules.inputs import looked_up
from sumgrad.diagnose.modules.inputs.looked_up import rows_looked_up_there_alone
from sumgrad.diagnose.modules.where.first_wrong import FirstWrong

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
