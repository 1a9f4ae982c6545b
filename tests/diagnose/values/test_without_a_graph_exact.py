"""A module that no gradient passes and that is wrong before what is named: it is not cleared."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sumgrad.diagnose.explainers.by_modules.backwards.way_back import in_some_calls
from sumgrad.diagnose.explainers.by_modules.forward import _without_a_graph
from sumgrad.diagnose.modules.values.seen import Seen
from sumgrad.record.trace import Call


def seen(module, state, back=None, rank=0, number=0, **more):
    call = Call(module=module, number=number, part=0, operation=0, operation_back=back,
                recomputed=False)  # fmt: skip
    return Seen(rank=rank, call=call, shape=(2, 3, 4), forward=state, wrong=torch.tensor([1, 4]),
                **more)  # fmt: skip


def said(**modules):
    look = SimpleNamespace(modules=[*modules], seen=modules, sources={})
    return _without_a_graph(look, SimpleNamespace(wrong="last"))


def test_what_makes_positions_is_named_where_it_is_wrong():
    last = [seen("last", "wrong", back=1)]
    assert said(rotary=[seen("rotary", "wrong"), seen("rotary", "right", rank=1)], last=last) == [
        "rotary, which runs before it and no gradient passes, gives what it gives nowhere in the "
        "single process, too: at least positions 1 of 3 on rank 0 in call 0 (2 x 3 x 4)"
    ]
    assert said(rotary=[seen("rotary", "right")], last=last) == []
    assert said(rotary=[seen("rotary", "wrong", back=2)], last=last) == []  # right again further on
    assert said(last=last, rotary=[seen("rotary", "wrong")]) == []


def test_calls_without_a_gradient_are_those_of_the_rank_that_is_named():
    found = SimpleNamespace(wrong="m", seen=[seen("m", "right", rank=2, number=1)])
    every = [seen("m", "right", back=0, rank=r, number=n) for r in (1, 2) for n in range(3 + r)]
    look = SimpleNamespace(seen={"m": every})
    assert in_some_calls(look, found) == ", in call 1 of 5 on rank 2; in the others one does"
