"""Modules that the single process calls and no rank does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.by_modules.never_called import never_called


def trace(called, seen=(), sources=None):
    return SimpleNamespace(
        calls=[SimpleNamespace(module=m) for m in called],
        classes=dict.fromkeys((*called, *seen), "Linear"),
        sources=sources or {},
    )


@pytest.mark.parametrize(
    ("ranks", "seen", "failed", "said"),
    [
        ([["a"], ["a"]], ["head", "head.A"], ["head.A.weight"], "head (Linear) is called in"),
        ([["a"], ["a"]], ["head", "head.A"], ["a.weight"], None),  # its parameters are right
        ([["a"], ["head", "a"]], ["head", "head.A"], ["head.A.weight"], "head.A is called in"),
        ([["a"]], [], ["head.A.weight"], None),  # the inside of a compiled one
        ([[]], ["head"], ["head.A.weight"], None),  # nothing was seen
    ],
)
def test_the_outermost_that_no_rank_calls(ranks, seen, failed, said):
    single = trace(["a", "what goes into head", "head", "head.A"], sources={"head": "Linear"})
    traces = SimpleNamespace(
        ranks={i: trace(own, seen if own else ()) for i, own in enumerate(ranks)}, single=single
    )
    (told,) = never_called(SimpleNamespace(traces=traces), failed) or [""]
    assert told.startswith(said) if said else not told


def test_nothing_without_a_second_look():
    assert not never_called(SimpleNamespace(traces=None), ["a.weight"])
