"""Closures that run again in a step are held against the single run's by their norms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sumgrad.judge.checks.closures import closures_that_run_again

SINGLE = {"w": 2.0, "b": 0.001}


def found(*own, single=((SINGLE,),), rank=1):
    """Of a rank, by step, what its closure gave when it was called again."""
    infos = {("structure", i): {"again": calls} for i, calls in enumerate(own)}
    record = SimpleNamespace(
        spec=SimpleNamespace(script=SimpleNamespace(again=single), tiers={"structure": "float64"}),
        ranks={0: SimpleNamespace(info={}), rank: SimpleNamespace(info=infos)},
    )
    return list(closures_that_run_again(SimpleNamespace(record=record)))


@pytest.mark.parametrize("own", [
    [SINGLE],
    [{"w": 2.0}],  # a rank that holds a part
    [{"w": 2.0 + 1e-6, "b": 0.0}],  # nothing beside the largest
])  # fmt: skip
def test_the_same_norms_and_what_is_small_beside_them(own):
    assert found(own) == []


def test_another_norm_or_another_number_of_calls():
    (one,) = found([{"w": 1.0, "b": 0.001}])
    assert one.level == "unknown"
    assert one.text == (
        "step 0: rank 1's optimizer calls its closure again, and in call 1 the gradient of w is "
        "another: the norm of w's is 1, in the single run 2: only the gradients of its first call "
        "are compared"
    )
    (one,) = found([SINGLE], [SINGLE, {"w": 3.0}], single=((SINGLE,), (SINGLE, SINGLE)))
    assert one.text.startswith("step 1: ")
    assert "in call 2 the gradient of w " in one.text
    (one,) = found([])
    assert "1 times, where the single run does 2 times" in one.text
    assert found([SINGLE], single=()) == []


def test_a_program_has_no_closure():
    record = SimpleNamespace(spec=SimpleNamespace(script=None, tiers={"s": "float64"}), ranks={})
    assert list(closures_that_run_again(SimpleNamespace(record=record))) == []
