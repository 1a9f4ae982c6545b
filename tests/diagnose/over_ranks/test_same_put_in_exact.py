"""Sums into which all ranks put the same, between an output and the gradient that reaches it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sumgrad.diagnose.explainers.by_modules.over_ranks.same_put_in import same_put_in
from sumgrad.record.exchanged import Exchange
from sumgrad.record.trace import Trace, Traces

SUM = "allreduce(SUM) of 4 float64 over ranks 0-1 [structure/0/step], at step.py:9"
A, B = torch.arange(4.0), torch.arange(4.0) + 1


def rank(*given, words=SUM):
    op = words.partition("(")[0].partition(" ")[0]
    event = {"op": op, "site": "step.py:9", "label": "step", "group": [0, 1], "reduce": "SUM"}
    return Trace(
        calls=(), outputs=(), gradients=(), sources={},
        operations=("barrier", *[words] * len(given)),
        events=({**event, "op": "barrier"}, *[event] * len(given)),
        exchanges=tuple(Exchange(number=i + 1, given=held) for i, held in enumerate(given)),
    )  # fmt: skip


def said(*ranks, until=9):
    call = SimpleNamespace(operation=1, operation_back=until)
    found = SimpleNamespace(seen=[SimpleNamespace(rank=0, call=call)])
    mine = dict(enumerate(ranks))
    traces = Traces(tier="structure", step=0, single=ranks[0], ranks=mine)
    return same_put_in(SimpleNamespace(traces=traces, tier="structure", step=0), found)


def test_what_all_put_in_alike_is_told():
    assert said(rank(A, B), rank(B, B)) == [
        "rank 0-1 all put the same numbers into the allreduce(SUM) of 4 float64 over ranks 0-1, at "
        "step.py:9: what comes out is 2 times what each has"
    ]


@pytest.mark.parametrize(
    ("ranks", "until"),
    [
        ([rank(A), rank(B)], 9),
        ([rank(A), rank()], 9),  # it alone
        ([rank(torch.ones(4)), rank(torch.ones(4))], 9),  # a count, say
        ([rank(A), rank(A)], 1),  # later
        ([rank(A), rank(A)], None),  # no gradient came
        ([rank(A, words="allgather of 4")] * 2, 9),
    ],
)
def test_other_sums_are_not(ranks, until):
    assert said(*ranks, until=until) == []
