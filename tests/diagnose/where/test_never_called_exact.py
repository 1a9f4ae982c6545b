"""Modules that the single process calls and no rank does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.diagnose.explainers.by_modules.forwards.never_called import (
    called_on_ranks_alone,
    never_called,
)


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
    names = ["a", "what goes into head", "head", "head.A", ""]  # of the last ranks call the parts
    single = trace(names, sources={"head": "Linear"})
    traces = SimpleNamespace(
        ranks={i: trace(own, ["", *seen] if own else ()) for i, own in enumerate(ranks)},
        single=single,
    )
    (told,) = never_called(SimpleNamespace(traces=traces), failed) or [""]
    assert told.startswith(said) if said else not told


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([["a", "head.old"]], ["head.old is called on rank 0, and not in the single process"]),
        ([["a", "head.old"], ["a"]], []),  # not on every wrong rank
        ([["a", "", "head.old"]],
         ["head.old is called on rank 0, and not in the single process"]),  # it is wrapped
        ([["a", "twin"]], []),  # the ranks' own, which build() did not make
        ([["a", "head.old", "head.old.A", "z"]],
         ["head.old, z are called on rank 0, and not in the single process"]),
    ],
)  # fmt: skip
def test_what_the_ranks_alone_call(ranks, said):
    single = trace(["a", "what goes into head", "head"], seen=["", "head.old", "head.old.A", "z"])
    single.left_out = ()
    traces = SimpleNamespace(ranks={i: trace(own) for i, own in enumerate(ranks)}, single=single)
    found = SimpleNamespace(ranks=tuple(range(len(ranks))))
    assert called_on_ranks_alone(SimpleNamespace(traces=traces), found) == said
    single.left_out = ("head.old", "z")
    assert not [t for t in called_on_ranks_alone(SimpleNamespace(traces=traces), found)
                if t.startswith("head.old,") or " z" in t]  # fmt: skip


def test_what_is_not_called_in_a_module_that_is_right_all_the_same():
    single = trace(["a", "head.A", "head"])
    traces = SimpleNamespace(ranks={0: trace(["a", "head"], ["head.A"])}, single=single)
    record = SimpleNamespace(traces=traces)
    assert never_called(record, ["head.A.weight"])
    assert not never_called(record, ["head.A.weight"], right=["a", "head"])


def test_nothing_without_a_second_look():
    assert not never_called(SimpleNamespace(traces=None), ["a.weight"])
